"""Serve the site with waitress: ``python serve.py --port 8000``, or on a listening socket that was handed over."""

from __future__ import annotations

import argparse
import logging
import os
import socket

import waitress
from django.contrib.staticfiles.handlers import StaticFilesHandler

from config.wsgi import application

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--fd", type=int, help="the number of an open file: a socket that listens already")
    arguments = parser.parse_args()
    if arguments.fd is None:
        where = {"listen": f"127.0.0.1:{arguments.port}"}
    else:
        where = {"sockets": [socket.socket(fileno=arguments.fd)]}
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    print(f"Process {os.getpid()} serves.", flush=True)
    waitress.serve(StaticFilesHandler(application), threads=40, **where)
