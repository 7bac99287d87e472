"""Of examples, a Space gets what its page shows: all of it becomes public."""

from hydra_transformers.hub import write_space
from hydra_transformers.hub.space import MOST_OF_A_GROUP
from tests.tiny_data import pictures


def files_in(folder) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_what_lies_beside_texts_stays_private(tmp_path):
    examples = tmp_path / "mine"
    (examples / "raw").mkdir(parents=True)
    for name in ("good.txt", "customers.csv", "raw/all.txt"):
        (examples / name).write_text("a film\n")
    space = write_space(tmp_path / "space", "me/my-hydra", examples=examples)
    assert files_in(space / "examples") == {"good.txt"}


def test_pictures_that_are_not_shown_stay_private(tmp_path):
    examples = tmp_path / "mine"
    (examples / "known" / "raw").mkdir(parents=True)
    [picture] = pictures([0])
    names = [f"known/{number:02}.png" for number in range(MOST_OF_A_GROUP + 1)]
    for name in (*names, "first.png", "known/raw/deep.png"):
        picture.save(examples / name)
    space = write_space(tmp_path / "space", "me/my-hydra", examples=examples)
    assert files_in(space / "examples") == {"first.png", *names[:-1]}
