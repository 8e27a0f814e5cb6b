"""Judge histories of locks, written as JSON lines (docs/histories.rst). Needs Python only: python check.py FILE"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from math import inf
from typing import Any

Line = dict[str, Any]
EVENTS = {"history", "granted", "empty", "raised", "waits", "believed", "freed", "fault"}
Wrong = Iterator[tuple[str, str]]  # the rule that was broken, and by whom


def histories(lines: Iterable[str]) -> list[tuple[Line, list[Line]]]:
    """Return each history: its first line says what is promised, the others what was seen."""
    found: list[tuple[Line, list[Line]]] = []
    for line in map(json.loads, lines):
        if line["event"] not in (EVENTS if found else ["history"]):
            raise ValueError(f"not an event of a history: {line}")
        found.append((line, [])) if line["event"] == "history" else found[-1][1].append(line)
    if not found:  # or what wrote nothing would pass
        raise ValueError("there is no history to judge")
    return found


def judge(head: Line, seen: list[Line]) -> Wrong:
    """Return what is wrong in a history."""
    faults = [line for line in seen if line["event"] == "fault"]
    for name in sorted({line["name"] for line in seen if "name" in line}):
        here = [line for line in seen if line.get("name") == name]
        freed = {line["fence"]: line["at"] for line in here if line["event"] == "freed"}
        beliefs: list[Line] = []
        for each in (line for line in here if line["event"] == "believed"):
            until = min(each["until"], freed.get(each["fence"], inf))  # exception: another caller released it
            beliefs += [{**each, "until": until}] if until > each["from"] else []
        beliefs.sort(key=lambda line: line["from"])
        calls = [line for line in here if line["event"] in ("granted", "empty", "raised", "waits")]
        yield from holders(name, head, beliefs, faults)
        yield from order(name, head, calls, faults)
        yield from liveness(name, head, calls, beliefs, faults)
        yield from answers(name, head, calls, faults)


def excused(first: Line, second: Line, faults: list[Line]) -> bool:
    """Exceptions: two holders by one given id are one; the server lost data, or its clock stepped, shortly before."""
    lost = (each for each in faults if first["name"] in each["loses"])
    one = (first["id"], first["fence"]) == (second["id"], second["fence"])
    return one or any(each["at"] <= second["from"] <= each["until"] for each in lost)


def calm(since: float, until: float, faults: list[Line]) -> bool:
    """Whether no fault, and no consequence of one, fell into this time. Only then order, life and errors count."""
    return not any(each["at"] <= until and each["until"] >= since for each in faults)


def holders(name: str, head: Line, beliefs: list[Line], faults: list[Line]) -> Wrong:
    believe: list[Line] = []
    for each in beliefs:
        others = [other for other in believe if other["until"] > each["from"] and not excused(other, each, faults)]
        if len(others) >= head["holders"]:
            yield "holders", f"{each['who']} and {others[0]['who']} hold {name} at once, at {each['from']}"
        for last in believe[-1:] if head["fences"] else ():
            if each["fence"] <= last["fence"] and not excused(last, each, faults):
                yield "fences", f"{each['who']} got {each['fence']} after {last['fence']}, at {each['from']}"
        believe.append(each)


def order(name: str, head: Line, calls: list[Line], faults: list[Line]) -> Wrong:
    slack = head["slack"]  # exception: within it nobody can say who came first
    for got in (call for call in calls if call["event"] == "granted" and not call["shared"]):
        for other in (call for call in calls if call["asked"] + slack < got["asked"] and not call["shared"]):
            if other["at"] > got["at"] + slack and calm(other["asked"], got["at"], faults):
                yield "order", f"{got['who']} got {name} before {other['who']}, at {got['at']}"


def liveness(name: str, head: Line, calls: list[Line], beliefs: list[Line], faults: list[Line]) -> Wrong:
    """A lock is free from the release (without one: from the expiry) until somebody believes to hold it again."""
    free = 0.0
    for begins, belief in [*((each["from"], each) for each in beliefs), (inf, {})]:
        for call in calls:
            since, until = max(free, call["asked"]), min(begins, call["at"])
            if until - since > head["free"] and calm(since, until, faults) and not call["shared"]:
                yield "liveness", f"{call['who']} waited for {name}, which was free from {since} to {until}"
        free = max(free, belief.get("until" if belief.get("released") else "expires", 0.0))


def answers(name: str, head: Line, calls: list[Line], faults: list[Line]) -> Wrong:
    for call in calls:
        took, limit = call["at"] - call["asked"], inf if call["timeout"] is None else call["timeout"]
        stood_still = [each for each in faults if each["what"] == "frozen" and call["who"].startswith(each["who"])]
        well = calm(call["asked"], call["at"], faults)
        if well and (call["event"] == "raised" or (call["event"] == "empty" and took < limit - 0.001)):
            yield "answers", f"{call['who']} came back without {name} after {took} s, at {call['at']}"
        if took > limit + head["slack" if well else "late"] and calm(call["asked"], call["at"], stood_still):
            yield "answers", f"{call['who']} waited for {took} s with a timeout of {limit} s, at {call['at']}"


if __name__ == "__main__":
    with open(sys.argv[1]) as file:  # noqa: PTH123
        wrong = [(head, *each) for head, seen in histories(file) for each in judge(head, seen)]
    print(*(f"history {head['history']}: {rule}: {what}" for head, rule, what in wrong), sep="\n")
    sys.exit(1 if wrong else 0)
