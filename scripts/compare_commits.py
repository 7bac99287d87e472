"""Compares what two checkouts of this repository compute: logits, losses, hidden states, attentions and gradients in float64.

    git worktree add --detach ../before COMMIT
    python scripts/compare_commits.py ../before .

Both run in processes of their own, over all families of `tests/families.py`: dense, pruned, fused with equal and with ragged
heads, sharing nothing and as by default, with a trunk; padded texts and others; sdpa and eager attention; with gradients and
without, which is where layers may run fast. The second also loads what the first has saved. It prints the largest
difference of each kind and fails where one is above the tolerance, or where names of parameters or fields of configs differ.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


TOLERANCE = 1e-12


def dump(folder: Path, name: str, saved_by: str | None) -> None:
    """Writes what this checkout computes to `folder/name.pt`, and its models below `folder/name`."""
    import torch

    from tests.families import FAMILIES

    torch.set_num_threads(1)
    numbers, structure = {}, {}
    for family in FAMILIES:
        inputs = family.inputs()
        for case, model in cases(family).items():
            place = f"{family.name}/{case}"
            structure[place] = {
                "keys": {key: list(tensor.shape) for key, tensor in model.state_dict().items()},
                "config": json.loads(model.config.to_json_string()),
            }
            numbers |= {f"{place}/{key}": value for key, value in outputs_of(model, inputs, case).items()}
            if case == "ragged, default":
                model.save_pretrained(folder / name / family.name)
                if saved_by is not None:
                    loaded = type(model).from_pretrained(folder / saved_by / family.name, dtype=torch.float64).eval()
                    with torch.no_grad():
                        numbers[f"{place}/loaded/logits"] = loaded(**inputs).member_logits
                    numbers[f"{place}/built/logits"] = numbers[f"{place}/sdpa/no_grad/member_logits"]
    torch.save((numbers, structure), folder / f"{name}.pt")


def cases(family) -> dict:
    """The models of a family, by the name of the case."""
    behind_the_first = [
        {name: {layer: heads for layer, heads in layers.items() if layer > 0} for name, layers in each.items()}
        if family.has_towers
        else {layer: heads for layer, heads in each.items() if layer > 0}
        for each in family.heads_to_prune
    ]
    members = [family.hydra.from_backbone(family.backbone(seed), behind_the_first[seed]) for seed in range(3)]
    return {
        "dense": family.hydra.from_backbone(family.backbone()),
        "pruned": family.members()[0],
        "uniform, default": family.fused("uniform"),
        "uniform, nothing shared": family.fused("uniform", shared=()),
        "ragged, default": family.fused(),
        "ragged, nothing shared": family.fused(shared=()),
        "trunk": family.hydra.from_pruned_members(members, trunk_layers=1),
    }


def outputs_of(model, inputs: dict, case: str) -> dict:
    import torch

    numbers = {}
    unpadded = {key: value for key, value in inputs.items() if key != "attention_mask"}
    for backend in ("sdpa", "eager"):
        model.set_attn_implementation(backend)
        with torch.no_grad():
            numbers |= {f"{backend}/no_grad/{key}": value for key, value in flat(model(**inputs)).items()}
            numbers[f"{backend}/without mask"] = model(**unpadded).member_logits
        shown = model(**inputs, output_hidden_states=True, output_attentions=backend == "eager")
        numbers |= {f"{backend}/shown/{key}": value for key, value in flat(shown).items()}
        model.zero_grad()
        outputs = model(**inputs)
        outputs.member_logits.square().sum().backward()
        numbers[f"{backend}/grad/member_logits"] = outputs.member_logits
        squares = [weight.grad.double().square().sum() for weight in model.parameters() if weight.grad is not None]
        numbers[f"{backend}/grad/norm"] = torch.stack(squares).sum().sqrt()
        model.zero_grad()
    model.set_attn_implementation("sdpa")
    if model.base_model is not model and not hasattr(model, "get_image_features"):
        with torch.no_grad():
            numbers |= {f"encoder/{key}": value for key, value in flat(model.base_model(**inputs)).items()}
        labels = torch.arange(len(next(iter(inputs.values())))) % model.config.num_labels
        numbers["loss"] = model(**inputs, labels=labels).loss
    return numbers


def flat(outputs) -> dict:
    """Tensors by name, those inside of tuples and of other outputs too."""
    import torch

    found = {}
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, (tuple, list)):
            found |= {f"{name}/{index}": each for index, each in enumerate(value) if each is not None}
        else:
            found |= {f"{name}/{key}": each for key, each in flat(value).items()}
    return found


def differences(first: dict, second: dict) -> dict[str, float]:
    """The largest difference of each kind of number, relative to its size where that is above one."""
    import torch

    largest = {}
    for name in sorted(first.keys() | second.keys()):
        kind = "/".join(name.split("/")[2:4])
        if name not in first or name not in second or first[name].shape != second[name].shape:
            largest[f"{name} (only in one, or of another shape)"] = float("inf")
            continue
        ours, theirs = first[name].double(), second[name].double()
        if not torch.equal(ours.isfinite(), theirs.isfinite()):
            largest[f"{name} (not finite in one)"] = float("inf")
            continue
        both = ours.isfinite()
        difference = (ours[both] - theirs[both]).abs().max().item() if both.any() else 0.0
        size = max(1.0, ours[both].abs().max().item() if both.any() else 0.0)
        largest[kind] = max(largest.get(kind, 0.0), difference / size)
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout")
    parser.add_argument("after", type=Path, nargs="?", default=Path(), help="another")
    parser.add_argument(
        "--folder", type=Path, help="keep the numbers here; what is there of `before` is not computed again"
    )
    parser.add_argument("--dump", nargs=2, metavar=("NAME", "SAVED_BY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.dump:
        return dump(args.folder.resolve(), args.dump[0], args.dump[1] or None)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for name, checkout, saved_by in (("before", args.before, ""), ("after", args.after, "before")):
            if name == "after" or not (folder / "before.pt").exists():
                command = [sys.executable, str(Path(__file__).resolve()), ".", "--folder", str(folder)]
                environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
                subprocess.run([*command, "--dump", name, saved_by], cwd=checkout, env=environment, check=True)
        sys.exit(compare(folder))


def compare(folder: Path) -> int:
    import torch

    (before, structure_before), (after, structure_after) = (
        torch.load(folder / f"{name}.pt", weights_only=False) for name in ("before", "after")
    )
    loaded = {name.replace("/loaded/", "/built/"): after.pop(name) for name in list(after) if "/loaded/" in name}
    built = {name: after.pop(name) for name in loaded}
    found = differences(before, after)
    found |= {"before's folder, loaded by after": max(differences(built, loaded).values())}
    print(f"{len(before)} tensors of {len(structure_before)} models")
    for kind, difference in found.items():
        print(f"{difference:.1e}  {kind}")
    differing = [place for place in structure_before if structure_before[place] != structure_after.get(place)]
    for place in differing:
        print(f"other parameters or config fields: {place}")
    return int(bool(differing) or max(found.values()) > TOLERANCE)


if __name__ == "__main__":
    main()
