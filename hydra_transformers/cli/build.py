"""`build`: from a pre-trained model and a data set to a Hydra of several fine-tunings, by the other commands in turn."""

import argparse
import shlex
from pathlib import Path

from transformers import PreTrainedConfig

from ..data.rows import is_same_source
from .arguments import (
    check_named_once,
    check_training,
    device_of,
    read_data,
)
from .building import check_heads, check_trainable, check_trunk, objectives_of, overlap
from .choosing import build_for_target
from .folders import (
    FUSE_SETTINGS,
    check_takes_files,
    claim,
    digest_of_names,
    load_config,
    load_processor,
    read_settings,
)
from .problems import CommandError


BUILD_SETTINGS = "build.json"
# What changes nothing, or is for --target alone.
NO_SETTINGS = ("command", "debug", "device", "others", "report_to", "target")
# What a step takes over as it is given here, where it is.
OF_DATA = ("image_column", "audio_column", "text_column", "max_length", "label_column", "processor")


def build(arguments: argparse.Namespace) -> None:
    if arguments.target is not None:
        return build_for_target(arguments)
    if arguments.others:
        raise CommandError(
            "several models are for --target, such as --target balance; to fuse them as they are, use `fuse`"
        )
    steps = steps_of(arguments)
    _check(arguments, steps)
    work = work_folder(arguments)
    settings = {name: value for name, value in vars(arguments).items() if name not in NO_SETTINGS}
    claim(
        work,
        BUILD_SETTINGS,
        {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()},
    )
    if not any(words[0] == "prune" for words in steps):
        print("Nothing will be pruned: for that, pass --ood-data or --objective acc, without --budget 0.")
    print(f"{len(steps)} steps, each of which you could run by itself; stop when you like, the same command goes on:")
    for words in steps:
        print(f"  hydra-transformers {shlex.join(words)}")
    for words in steps:
        if not _is_done(arguments, words[0]):
            print(f"\n{words[0]}:", flush=True)
            run_step(words)
    print(f"\nThe Hydra is in {arguments.output}, its members are in {work}.")


def run_step(words: list[str]) -> None:
    from . import build_parser

    parser, runs = build_parser(words)
    runs[words[0]](parser.parse_args(words))


def work_folder(arguments: argparse.Namespace) -> Path:
    output = arguments.output if arguments.output.name else arguments.output.resolve()
    return output.with_name(f"{output.name}-steps")


def steps_of(arguments: argparse.Namespace) -> list[list[str]]:
    """The commands, as one would type them."""
    work, data = work_folder(arguments), ["--data", arguments.data, *_given(arguments, "split", *OF_DATA)]
    common = ["--batch-size", arguments.batch_size]
    training = [*_given(arguments, "limit", "max_steps"), "--seed", arguments.seed, *common]
    training += ["--report-to", arguments.report_to] if arguments.report_to != "none" else []
    trunk = _given(arguments, "trunk_layers")
    training += trunk if arguments.freeze_trunk else []
    device = _given(arguments, "device")
    steps, members = [], work / "finetuned"
    steps.append(["finetune", arguments.pretrained, "--members", arguments.members, *data, "--part", "training"])
    steps[-1] += [*_given(arguments, "recipe", "epochs"), *training, "--output", members]
    objective = arguments.objective or ("avg" if arguments.ood_data else None)
    if objective is not None and arguments.budget != 0:
        steps.append(["prune", members, *data, "--part", "validation", "--objectives", objective])
        steps[-1] += [*_given(arguments, "ood_data", "ood_split", "budget", "mode"), *trunk]
        steps[-1] += ["--limit", arguments.circuit_rows, "--seed", arguments.seed, *common, *device]
        members = work / "pruned"
        steps[-1] += ["--output", members]
    if arguments.tune:
        steps.append(["finetune", members, *data, "--part", "training", *training, "--output", work / "tuned"])
        members = work / "tuned"
    steps.append(["fuse", members, *trunk, "--output", arguments.output])
    test = [*data, "--part", "test"]
    if arguments.test_data is not None or arguments.test_split is not None:
        test = ["--data", arguments.test_data or arguments.data, *_given(arguments, *OF_DATA)]
        test += [] if arguments.test_split is None else ["--split", arguments.test_split]
    others = [
        word
        for group in ("near", "far")
        for name, each in getattr(arguments, group)
        for word in (f"--{group}", f"{name}={each}")
    ]
    single = ["--compare", f"single={work / 'finetuned' / 'member-0'}"]
    steps.append(
        ["evaluate", arguments.output, *test, *_given(arguments, "limit"), *others, *single, *common, *device]
    )
    return [[str(word) for word in words] for words in steps]


def _given(arguments: argparse.Namespace, *names: str) -> list:
    """The flags of these names, where they are given."""
    found = [(f"--{name.replace('_', '-')}", getattr(arguments, name)) for name in names]
    return [word for flag, value in found if value is not None for word in (flag, value)]


def _is_done(arguments: argparse.Namespace, command: str) -> bool:
    """Whether a step need not even look: the Hydra is there, or its evaluation. Other steps know what they have done."""
    if command == "evaluate":
        return (arguments.output / "evaluation" / "report.json").exists()
    return (arguments.output / FUSE_SETTINGS).exists()


# What can be told before the first step


def _check(arguments: argparse.Namespace, steps: list[list[str]]) -> None:
    if arguments.members < 2:
        raise CommandError("--members is 1, which is no ensemble: pass at least 2")
    is_pruned = any(words[0] == "prune" for words in steps)
    if arguments.budget == 0 and (arguments.ood_data or arguments.objective):
        raise CommandError(
            "--budget 0 prunes nothing, so there is no use for --ood-data and --objective: leave them out"
        )
    if not is_pruned and arguments.budget:
        raise CommandError("--budget is for pruning: pass --ood-data, by which heads are chosen, or --objective acc")
    if not is_pruned and arguments.tune:
        raise CommandError("--tune is for pruned members, and nothing is pruned: pass --ood-data or --objective acc")
    check_training(arguments)
    if arguments.freeze_trunk and not arguments.trunk_layers:
        raise CommandError("--freeze-trunk is for a trunk, and there is none: pass --trunk-layers, too")
    for group in ("near", "far"):
        check_named_once([name for name, _ in getattr(arguments, group)], f"--{group}")
    if arguments.output.resolve().name == "single":
        raise CommandError("--output is called single, as the evaluation calls one fine-tuning: name it otherwise")
    _check_output(arguments, steps)
    device_of(arguments)
    config = load_config(arguments.pretrained)
    check_trainable(arguments.pretrained, config)
    check_trunk(arguments.trunk_layers, arguments.pretrained, config)
    if is_pruned:
        _check_pruning(arguments, config, next(words for words in steps if words[0] == "prune"))
    _check_data(arguments, config)


def _check_output(arguments: argparse.Namespace, steps: list[list[str]]) -> None:
    """Refuses a folder that holds something else than this Hydra."""
    output, fuse = arguments.output, next(words for words in steps if words[0] == "fuse")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        record, members = output / FUSE_SETTINGS, [f"{fuse[1]}/member-{index}" for index in range(arguments.members)]
        if not record.exists() or read_settings(record).get("made_of") != digest_of_names(members):
            raise CommandError(f"{output} exists already: pass another --output, or remove it")
    check_takes_files(output)


def _check_pruning(arguments: argparse.Namespace, config: PreTrainedConfig, words: list[str]) -> None:
    from . import build_parser

    pruning = build_parser(words)[0].parse_args(words)
    objectives = objectives_of(pruning, arguments.members)
    check_heads(pruning, arguments.pretrained, config, objectives, arguments.members, is_one_of_several=True)
    if arguments.ood_data and is_same_source(arguments.data, arguments.ood_data) and not arguments.ood_split:
        raise CommandError(
            f"--ood-data {arguments.ood_data} is the data itself, which cannot be out of its own distribution: pass other "
            "data, or an --ood-split of it"
        )


def _check_data(arguments: argparse.Namespace, config: PreTrainedConfig) -> None:
    """Opens every set, so that what is missing is missed before the training; the data itself comes with the first step."""
    is_own_split = arguments.test_data is None and arguments.test_split is not None
    if is_own_split and overlap(arguments.split or "train", arguments.test_split):
        raise CommandError(f"--test-split {arguments.test_split} has rows that are trained on: pass another")
    processor = load_processor(arguments.processor or arguments.pretrained, config)
    few = argparse.Namespace(**vars(arguments) | {"limit": 2})
    sets = [(arguments.ood_data, arguments.ood_split)] if arguments.ood_data else []
    if arguments.test_data or arguments.test_split:
        sets.append((arguments.test_data or arguments.data, arguments.test_split))
    sets += [(source, None) for group in ("near", "far") for _, source in getattr(arguments, group)]
    for name, split in sets:
        read_data(
            few, config, processor, name, split, labelled=False, is_told=False, prefer=("train", "validation", "test")
        )
