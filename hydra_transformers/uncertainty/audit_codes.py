"""Codes of audited rows: the score that decides and the place in the draw, which reviewers need not see.

A reviewer who sees scores may label the surest rows first. A code hides the score from the eye, not from a program.
"""

import hashlib
import struct
from typing import NamedTuple


PAYLOAD = struct.Struct(">dI")  # the score and the place
CHECK_BYTES = 4


class AuditedRow(NamedTuple):
    """What the code of a row holds: its place among the drawn rows, from 0 on, and the score of the model's detector."""

    place: int
    score: float


def encode_row(audit_id: str, row: str, place: int, score: float) -> str:
    """Return the code of a row, which begins with a letter, so that no spreadsheet takes it for a number.

    Args:
        audit_id (`str`), row (`str`): of which audit it is, and its number in the data.
        place (`int`), score (`float`): see `AuditedRow`.

    Example:
        >>> decode_row("monday", "12", encode_row("monday", "12", 3, 0.25))
        AuditedRow(place=3, score=0.25)
    """
    payload = PAYLOAD.pack(score, place)
    content = payload + _checksum(audit_id, row, payload)
    return "c" + _masked(audit_id, row, content).hex()


def decode_row(audit_id: str, row: str, code: str) -> AuditedRow | None:
    """Return what the code of a row holds; None for one that is not a code of this row."""
    try:
        content = _masked(audit_id, row, bytes.fromhex(code.removeprefix("c")))
    except ValueError:
        return None
    payload = content[: PAYLOAD.size]
    if len(payload) < PAYLOAD.size or content[PAYLOAD.size :] != _checksum(audit_id, row, payload):
        return None
    score, place = PAYLOAD.unpack(payload)
    return AuditedRow(place, score)


def _checksum(audit_id: str, row: str, payload: bytes) -> bytes:
    return hashlib.sha256(f"check {audit_id} {row} ".encode() + payload).digest()[:CHECK_BYTES]


def _masked(audit_id: str, row: str, content: bytes) -> bytes:
    """Return bytes that look random; the same again gives the content back."""
    mask = hashlib.sha256(f"mask {audit_id} {row}".encode()).digest()
    return bytes(byte ^ other for byte, other in zip(content, mask, strict=False))
