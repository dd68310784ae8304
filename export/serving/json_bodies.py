"""Limits of JSON bodies, checked before they are parsed.

Parsers keep the GIL: 4 MB of `[],[],…` would stop all other requests for half a second, and take 22
times its size. So the values are counted in the bytes, which takes milliseconds.
"""

import codecs
import json
import re

import numpy as np

from ..errors import RequestError

# A body of the maximum size may have a value per 16 bytes, and one of STRUCTURE per 256 bytes. The
# first allows images in JSON, and one as large is parsed in 30 ms.
BYTES_PER_VALUE, BYTES_PER_CONTAINER = 16, 256
STRUCTURE = (b"[", b"{", b":")  # begin an array, an object, and the value of a field
CONSTANTS = re.compile(rb"-?Infinity|NaN")  # values that `json.loads` accepts and JSON does not
SURROGATE_BITS, HIGH, LOW = 0xFC00, 0xD800, 0xDC00  # the bits that tell halves of surrogate pairs
RAW_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")


def json_text(body: bytes) -> bytes:
    """Return the JSON array or object in `body` as UTF-8, or empty bytes if it is something else.

    `body` may be in UTF-16 or UTF-32, as for `json.loads`. A body that only begins like JSON is
    returned too.
    """
    encoding = json.detect_encoding(body)
    if encoding != "utf-8":
        body = body.decode(encoding, "replace").encode("utf-8", "replace")
    text = body.removeprefix(codecs.BOM_UTF8)
    return text if text.lstrip()[:1] in (b"{", b"[") else b""


def check_size(text: bytes, max_body: int) -> None:
    """Check the number of values, and that of arrays, objects and fields, in the JSON `text`.

    Raises:
        RequestError: 413 if one exceeds its limit, which follows from `max_body`, the maximum size
            of a body in bytes.
    """
    limits = {
        "values": ((b",",), max_body // BYTES_PER_VALUE),
        "arrays, objects and fields": (STRUCTURE, max_body // BYTES_PER_CONTAINER),
    }
    if all(count(text, symbols) <= limit for symbols, limit in limits.values()):
        return
    outside = outside_strings(text)
    for name, (symbols, limit) in limits.items():
        if (number := count(outside, symbols)) > limit:
            raise RequestError(
                413, f"the body has more than {number} {name}, expected at most {limit}"
            )


def check_values(text: bytes, validation: int) -> None:
    """Check that the JSON `text` has no NaN, Infinity or half of a surrogate pair, which
    `json.loads` accepts. Text that is not JSON passes, or is rejected for the same reasons.

    Raises:
        RequestError: with the status `validation`, if it has one of them.
    """
    is_suspicious = b"NaN" in text or b"Infinity" in text
    if is_suspicious and (constant := CONSTANTS.search(outside_strings(text))):
        raise RequestError(
            validation,
            f"the body has the value {constant[0].decode()}, expected numbers that JSON allows",
        )
    if surrogate := lone_surrogate(text):
        raise RequestError(
            validation,
            f"the body has the lone surrogate {surrogate!a}, expected Unicode characters",
        )


def count(text: bytes, symbols: tuple[bytes, ...]) -> int:
    return sum(map(text.count, symbols))


def outside_strings(text: bytes) -> bytes:
    """Return what is outside of the strings in the JSON `text`, with one quote for each string."""
    text = text.replace(rb"\\", b"").replace(rb"\"", b"")
    values = np.frombuffer(text, np.uint8)
    is_inside = np.bitwise_xor.accumulate(values == ord('"'))
    return values[~is_inside].tobytes()


def lone_surrogate(text: bytes) -> str | None:
    """Return the first half of a surrogate pair without its other half in the JSON `text`, or None.

    It is written as bytes or as an escape."""
    if b"\xed" in text and (raw := RAW_SURROGATE.search(text)):
        return raw[0].decode("utf-8", "surrogatepass")
    if rb"\ud" not in text and rb"\uD" not in text:
        return None
    try:  # each escape becomes a character, and each other byte one below 256
        letters = np.array([text.decode("raw_unicode_escape")]).view(np.uint32)
    except UnicodeDecodeError:  # no escape of JSON, which the endpoint reports
        return None
    kinds = np.pad(letters & SURROGATE_BITS, 1)
    is_lone = (kinds[:-1] == HIGH) != (kinds[1:] == LOW)
    place = int(is_lone.argmax())
    return chr(letters[place - (kinds[place] == HIGH)]) if is_lone[place] else None
