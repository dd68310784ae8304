"""Answers read from a socket."""

import json


def read_answer(connection):
    """Return (status, JSON) of the next answer on the socket `connection`."""
    file = connection.makefile("rb")
    status = int(file.readline().split()[1])
    headers = dict(line.strip().lower().split(b": ", 1) for line in iter(file.readline, b"\r\n"))
    return status, json.loads(file.read(int(headers[b"content-length"])))


def is_closed(connection):
    """Return True if the server closes the socket `connection` within the socket's timeout."""
    try:
        return connection.recv(1000) == b""
    except ConnectionResetError:
        return True
