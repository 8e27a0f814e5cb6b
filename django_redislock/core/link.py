"""One connection on which scripts are called, by one thread at a time."""

from __future__ import annotations

from typing import Any

from redis.exceptions import ConnectionError, NoScriptError, RedisError, ResponseError

from .steps import Call, Calls, Commands
from .wire import Wire, pack


class Link(Wire):
    """One connection on which scripts are called."""

    seated = False
    """Whether it is kept when it is given back."""
    era: object = None
    """Tells whether it was opened before the server was found to be no primary."""
    idle_since = 0.0
    """When it was last used."""

    def call(self, call: Call) -> Any:
        """Run the script and return its reply.

        Any failure closes the connection, so that no reply is left behind.
        """
        try:
            self.send(call.request)
            try:
                return self.receive()
            except NoScriptError:
                self.send(call.whole)
                return self.receive()
        except ResponseError:
            raise
        except ConnectionError:  # the call will be repeated, and an undo that arrives later would undo that
            self.close()
            raise
        except BaseException:
            self._abort(call)
            raise

    def call_all(self, calls: Calls) -> list[Any]:
        """Run the scripts and return their replies, an error in place of what was refused, as `call` does."""
        try:
            self.send(b"".join([call.request for call in calls.calls]))
            replies = [self._reply() for _ in calls.calls]
            unknown = [number for number, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
            if unknown:
                self.send(b"".join([calls.calls[number].whole for number in unknown]))
                for number in unknown:
                    replies[number] = self._reply()
            return replies
        except ConnectionError:
            self.close()
            raise
        except BaseException:
            self._abort(*calls.calls)
            raise

    def _reply(self) -> Any:
        try:
            return self.receive()
        except ResponseError as error:
            return error

    def ask(self, commands: Commands) -> list[Any]:
        """Send the commands and return their replies; any failure closes the connection."""
        try:
            self.send(b"".join([pack(*command) for command in commands.commands]))
            return [self.receive() for _ in commands.commands]
        except BaseException:
            self.close()
            raise

    def _abort(self, *calls: Call) -> None:
        """Close the connection, and have undone what the call may still do: on the same connection it comes after it."""
        try:
            for call in calls:
                if call.undo is not None and self.open:
                    self.send(call.undo().whole)
        except (RedisError, OSError):
            pass  # then the server never sees it, or is gone
        finally:
            self.close()
