"""The generated parts of a card: marked, sealed with a checksum, and renewed without touching the text around them."""

import hashlib
import re

from huggingface_hub import ModelCard, ModelCardData


# `<!-- generated: cost 1a2b3c4d -->` ... `<!-- end -->`; the checksum shows whether the text between was edited.
PART = re.compile(
    r"<!-- generated: (?P<name>[a-z ]+?)(?: (?P<seal>[0-9a-f]{8}))? -->\r?\n(?P<text>.*?)<!-- end -->", re.DOTALL
)
TO_FILL_IN = "**To be filled in after training:**"


class EditedCardError(ValueError):
    """A new card would overwrite text on the Hub."""


def to_fill_in(what: str) -> str:
    return f"{TO_FILL_IN} {what}"


def sealed(content: str) -> str:
    """The text of a card with a checksum in the mark of every generated part."""
    return PART.sub(lambda part: _written(part["name"], part["text"]), content)


def renewed(existing: str, new: ModelCard) -> ModelCard:
    """The existing card with the generated parts and the metadata of the new one.

    Text outside the generated parts stays. A generated part that is still to be filled in leaves the old one in place.
    Metadata of the new card wins, other entries stay, tags are joined.
    """
    old = ModelCard(existing, ignore_metadata_errors=True)
    data = _joined(old.data, new.data)
    if not old.text.strip():
        return _card(data, new.text)
    if not PART.search(old.text):
        raise EditedCardError("the card on the Hub was not made by create_model_card")
    _check_seals(old.text)
    fresh = {part["name"]: part["text"] for part in PART.finditer(new.text)}

    def choose(part: re.Match) -> str:
        text = fresh.get(part["name"], part["text"])
        return part[0] if text.startswith(TO_FILL_IN) else _written(part["name"], text)

    return _card(data, PART.sub(choose, old.text))


def replaced(existing: str, own: ModelCard) -> ModelCard:
    """A user's own card in place of the existing one; refused if text outside generated parts would be lost."""
    old = ModelCard(existing, ignore_metadata_errors=True)
    if old.text.strip():
        _check_seals(old.text)
        if _text_around_parts(old.text) != _text_around_parts(own.text):
            raise EditedCardError("the card on the Hub has other text than the card that you pass")
    return _card(_joined(old.data, own.data), own.text)


def _check_seals(text: str) -> None:
    for part in PART.finditer(text):
        if part["seal"] != _seal(part["text"]):
            raise EditedCardError(f"the generated part {part['name']!r} of the card on the Hub was edited by hand")


def _text_around_parts(text: str) -> list[str]:
    return _lines(PART.sub(lambda part: part["name"], text))


def _joined(old: ModelCardData, new: ModelCardData) -> ModelCardData:
    fields = old.to_dict() | new.to_dict()
    if old.tags and new.tags:
        fields["tags"] = list(dict.fromkeys([*old.tags, *new.tags]))
    return ModelCardData(**fields, ignore_metadata_errors=True)


def _card(data: ModelCardData, text: str) -> ModelCard:
    return ModelCard(f"---\n{data.to_yaml()}\n---\n{text}")


def _written(name: str, text: str) -> str:
    return f"<!-- generated: {name} {_seal(text)} -->\n{text}<!-- end -->"


def _seal(text: str) -> str:
    return hashlib.sha256("\n".join(_lines(text)).encode()).hexdigest()[:8]


def _lines(text: str) -> list[str]:
    # Editors and the Hub's form may change line ends and trailing blanks.
    return [line.rstrip() for line in text.strip().splitlines()]
