"""Which files an ONNX graph keeps tensors in, read from its bytes: onnxruntime opens them wherever they are.

A file of protobuf is a message, which is a row of fields: a varint with the field's number and kind, then its value. Only the
few that lead to a tensor are read; all else, weights included, is passed over.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# Message -> the number of each field that leads to a tensor, and its message (onnx.proto).
MESSAGES = {
    "Model": {7: "Graph", 20: "TrainingInfo", 25: "Function"},
    "TrainingInfo": {1: "Graph", 2: "Graph"},
    "Function": {7: "Node", 11: "Attribute"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
    "Tensor": {13: "Entry"},
}
KEY = 1
VALUE = 2  # fields of an entry, both text


def check_external_data(directory: Path, file: str, listed: dict) -> None:
    """Checks that `file` of the export `directory` keeps tensors only in itself and in files that are `listed`.

    Raises:
        ValueError: naming one that is not, and for a file that is no protobuf.
    """
    try:
        found = sorted(locations(directory / file))
    except (IndexError, ValueError) as error:
        raise ValueError(f"{directory / file} is no ONNX graph, or a damaged one: {error}") from None
    for location in found:
        if (PurePosixPath(file).parent / location).as_posix() not in listed:
            raise ValueError(f"{directory / file} keeps external data in {location!r:.200}, which manifest.json does not list")


def locations(path: Path) -> set[str]:
    """What the tensors of the graph at `path`, in subgraphs and functions too, name as the places of their data."""
    found: set[str] = set()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        messages = [("Model", 0, len(data))]
        while messages:
            message, start, end = messages.pop()
            if message == "Entry":
                texts = [(number, data[first:last]) for number, first, last in fields(data, start, end)]
                if (KEY, b"location") in texts:
                    found |= {text.decode(errors="replace") for number, text in texts if number == VALUE} or {""}
            else:
                inside = MESSAGES[message]
                messages += [
                    (inside[number], first, last) for number, first, last in fields(data, start, end) if number in inside
                ]
    return found


def fields(data: mmap.mmap, place: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The number of each field of the message from `place` to `end` that has a length, and where its value starts and ends."""
    while place < end:
        tag, place = varint(data, place)
        kind = tag & 7
        number = (tag & 0xFFFFFFFF) >> 3  # of a tag protobuf reads 32 bits
        if kind == 0:
            _, place = varint(data, place)
        elif kind == 2:
            length, place = varint(data, place)
            if place + length <= end:
                yield number, place, place + length
            place += length
        elif kind in (1, 5):
            place += 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of kind {kind} at byte {place}")
    if place > end:
        raise ValueError(f"a field that ends at byte {place}, expected at most {end}")


def varint(data: mmap.mmap, place: int) -> tuple[int, int]:
    """The number at `place`, 7 bits a byte, lowest first, and the place after it."""
    number = shift = 0
    while True:
        byte = data[place]  # IndexError at the end of the file
        number |= (byte & 127) << shift
        place = place + 1
        shift = shift + 7
        if byte < 128:
            return number, place
        if shift > 63:
            raise ValueError(f"a number of more than 10 bytes at byte {place}")
