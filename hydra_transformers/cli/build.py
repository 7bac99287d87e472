"""`build`: from a pre-trained model and data to a Hydra, by the other commands in turn, or with --target by a search."""

import copy
import shlex
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import typer
from transformers import PreTrainedConfig

from .._io.files import check_takes_files
from .._io.processes import from_first_process, on_one_process, rank_and_world_size
from ..data.loading import check_has_variety, remember_max_length
from ..data.processors import check_same_processors, load_processor
from ..data.rows import SPLITS_TO_CUT, is_same_source, overlap
from ..data.tags import TOKEN_CLASSIFICATION
from ..fusion.probe import TEXT_TOKENS
from ..pruning import MemberPlan
from ..pruning.objectives import OBJECTIVES
from ..training.from_pretrained import check_classifiers, check_trainings, fine_tunings_within
from ..training.recipes import recipe_for
from . import flags
from .finetune import RecipeName, change_by, check_trainable, check_training, check_trunk, name_classes
from .folders import FUSE_SETTINGS, claim, digest_of_names, load_config, members_in, models_named, read_settings
from .options import (
    argument,
    check_named_once,
    choice,
    count_or_best,
    device_named,
    layers_or_share,
    minutes,
    option,
    switch,
)


BUILD_SETTINGS = "build.json"
MERGED_SHARE = 0.75  # of the layers, where nothing is pruned; it held on images and on texts (docs/results.md)
# They change no result, are for --target alone, or are checked by `finetune`.
NO_SETTINGS = {"device", "report_to", "target", "time_limit", "divide"}
FOR_ALL_STEPS = ("image_column", "audio_column", "text_column", "max_length", "label_column", "processor")
CHOSEN_BY_TARGET = (
    "classifiers",
    "tune_jointly",
    "budget",
    "objective",
    "mode",
    "circuit_rows",
    "tune",
    "trunk_layers",
    "freeze_trunk",
    "divide",
)
CHOSEN_BY_TARGET += ("test_data", "test_split")
CHOICE, PRUNING, TESTS = "Choose for me", "Pruning and merging", "Tests"


def parse_target(text: str) -> str | dict[str, float]:
    """balance, quality, cost=1.3 or accuracy_within=0.5"""
    name, sign, value = text.partition("=")
    if not sign and name in ("balance", "quality"):
        return name
    try:
        if name in ("cost", "accuracy_within"):
            return {name: float(value)}
    except ValueError:
        pass
    raise typer.BadParameter(f"{text} is not a target: pass balance, quality, cost=1.3 or accuracy_within=0.5")


@dataclass(kw_only=True)
class BuildOptions(flags.DataOptions):
    """How a Hydra is built."""

    output: option(
        Path, "gets the Hydra and its evaluation; DIR-steps the members. Run again to continue after a stop", "DIR"
    )
    members: option(int, "fine-tunings; with --target the most members, fewer are tried", "M", min=1) = 3
    fine_tunings: option(
        int | None,
        "make more fine-tunings than members and average them into these, such as 6 for 3 members, two into each: better, "
        "and no slower to run; with --target that is tried, too",
        "N",
        min=2,
    ) = None
    trainings: flags.Trainings = None
    classifiers: flags.Classifiers = None
    target: option(
        Any,
        "try budgets, trunks, what to share and tuning, and take the best: balance (the fastest Hydra at most half a point "
        "below the best), quality (the best detection at most half a point of accuracy below the best), cost=1.3 (the best "
        "within 1.3 times one model's time, measured here) or accuracy_within=1",
        "TARGET",
        CHOICE,
        parser=parse_target,
    ) = None
    time_limit: option(
        float | None,
        "with --target: begin nothing new after so many minutes, and take the best so far; the same command with more "
        "minutes continues",
        "MINUTES",
        CHOICE,
        parser=minutes,
    ) = None
    recipe: RecipeName = None
    regression: flags.Regression = False
    epochs: flags.Epochs = None
    max_steps: flags.MaxSteps = None
    report_to: flags.ReportTo = "none"
    budget: option(
        Any,
        "heads each member loses, 0 for none (default: a sixth of the candidates); best: as many as its circuit scores best "
        "without",
        "N",
        PRUNING,
        parser=count_or_best,
    ) = None
    ood_data: option(str | None, "out-of-distribution data to choose heads by", "NAME_OR_FOLDER", PRUNING) = None
    ood_split: flags.OodSplit = None
    objective: option(
        choice(OBJECTIVES) | None,
        "of the circuits (default: avg with --ood-data; without, nothing is pruned)",
        panel=PRUNING,
    ) = None
    mode: flags.Mode = "exact"
    circuit_rows: option(int, "rows of each set to extract circuits with", "N", PRUNING, min=1) = 1_000
    tune: switch("--tune", "fine-tune again after pruning", PRUNING) = False
    trunk_layers: option(
        Any,
        "merge the first N layers whole, or a share such as 0.75, and prune none of them: they run once for all; 0 for none "
        "(default: 0.75 if nothing is pruned, otherwise those that are equal)",
        "N",
        PRUNING,
        parser=layers_or_share,
    ) = None
    tune_jointly: switch(
        "--tune-jointly",
        "at the end train the Hydra as a whole for a few epochs, its own members with nothing merged as teacher: better, and no "
        "slower to run",
        PRUNING,
    ) = False
    freeze_trunk: switch(
        "--freeze-trunk", "do not train the trunk and the embeddings, so that merging changes nothing", PRUNING
    ) = False
    test_data: option(str | None, "default: a tenth of the data, not trained on", "NAME_OR_FOLDER", TESTS) = None
    test_split: option(str | None, "a split of --test-data, or of --data", panel=TESTS) = None
    near: flags.NearData = None
    far: flags.FarData = None
    seed: flags.Seed = 0
    batch_size: flags.BatchSize = 32
    divide: flags.Divide = "members"
    device: flags.Device = None

    @property
    def steps_folder(self) -> Path:
        output = self.output if self.output.name else self.output.resolve()
        return output.with_name(f"{output.name}-steps")

    @property
    def circuit_objective(self) -> str | None:
        """None where nothing is pruned."""
        return None if self.budget == 0 else self.objective or ("avg" if self.ood_data else None)

    @property
    def merged_layers(self) -> int | float | None:
        """How many layers are merged, or which share; None for those that are equal."""
        is_chosen = self.trunk_layers is not None or self.circuit_objective is not None
        return self.trunk_layers if is_chosen else MERGED_SHARE

    @property
    def members_folder(self) -> Path:
        """The members that are fused at the end; after a joint tuning the one Hydra that they became."""
        last = "tuned" if self.tune else "pruned" if self.circuit_objective is not None else "finetuned"
        return self.steps_folder / ("tuned-jointly" if self.tune_jointly else last)

    @property
    def trained(self) -> int:
        """How many models are fine-tuned."""
        return self.fine_tunings or self.members

    def given(self, *names: str) -> list:
        """The flags of these names with their values, if they are set."""
        found = [(f"--{name.replace('_', '-')}", getattr(self, name)) for name in names]
        return [word for flag, value in found if value is not None for word in (flag, value)]


def build(
    pretrained: argument(str, "PRETRAINED", "a pre-trained model, by folder or Hub name"),
    options: BuildOptions,
    others: argument(
        list[str] | None,
        "MODEL",
        "with --target, if the first is a fine-tuned classifier: others of the same pre-trained model; nothing is fine-tuned "
        "then, and none of them may be trained on --data",
    ) = None,
) -> None:
    """Go from a pre-trained model and data to a Hydra: fine-tune several times, prune, fuse, evaluate; or choose for me
    (--target)."""
    for group in ("near", "far"):
        check_named_once([name for name, _ in getattr(options, group) or []], f"--{group}")
    check_training(options.epochs, options.max_steps, options.report_to)
    _check_fine_tunings(options)
    if options.target is not None:
        if rank_and_world_size()[1] > 1:
            raise ValueError("--target searches in one process: start it without torchrun and accelerate launch")
        return _build_for_target([pretrained, *(others or [])], options)
    if others:
        raise ValueError(
            "several models are for --target, such as --target balance; to fuse them as they are, use `fuse`"
        )
    _check(pretrained, options)
    settings = {name: value for name, value in vars(options).items() if name not in NO_SETTINGS}
    on_one_process(lambda: claim(options.steps_folder, BUILD_SETTINGS, {"pretrained": pretrained, **settings}))
    if options.circuit_objective is None:
        print("Nothing will be pruned: for that, pass --ood-data or --objective acc, without --budget 0.")
        if options.trunk_layers is None:
            print(f"Up to {MERGED_SHARE:.0%} of the layers will be merged: for none, pass --trunk-layers 0.")
    steps = steps_of(pretrained, options)
    on_one_process(lambda: _check_order(steps, options.output))
    print(f"{len(steps)} steps, which can be run one by one, too; stop when you like, the same command continues:")
    for words in steps:
        print(f"  hydra-transformers {shlex.join(words)}")
    for words in steps:
        if not from_first_process(_is_done(options.output, words)):
            print(f"\n{words[0]}:", flush=True)
            run_step(words)
    print(f"\nThe Hydra is in {options.output}, its members are in {options.steps_folder}.")


def run_step(words: list[str]) -> None:
    from . import FOR_SEVERAL_PROCESSES, run

    if words[0] in FOR_SEVERAL_PROCESSES:
        run(words)
    else:
        on_one_process(lambda: run(words))


def steps_of(pretrained: str, options: BuildOptions) -> list[list[str]]:
    """The commands, as one would type them."""
    folder, given = options.steps_folder, options.given
    data = ["--data", options.data, *given("split", *FOR_ALL_STEPS)]
    common, merged = ["--batch-size", options.batch_size], options.merged_layers
    trunk = [] if merged is None else ["--trunk-layers", merged]
    training = [*given("limit", "max_steps"), "--seed", options.seed, *common]
    training += ["--report-to", options.report_to] if options.report_to != "none" else []
    training += trunk if options.freeze_trunk else []
    training += ["--divide", options.divide] if options.divide != "members" else []
    members = folder / "finetuned"
    steps = [["finetune", pretrained, "--members", options.trained, *data, "--part", "training"]]
    steps[-1] += ["--regression"] if options.regression else []
    steps[-1] += [*given("trainings", "classifiers", "recipe", "epochs"), *training, "--output", members]
    if options.circuit_objective is not None:
        steps.append(["prune", members, *data, "--part", "validation", "--objectives", options.circuit_objective])
        steps[-1] += [*given("ood_data", "ood_split", "budget", "mode"), *trunk, "--limit", options.circuit_rows]
        members = folder / "pruned"
        steps[-1] += ["--seed", options.seed, *common, *given("device"), "--output", members]
    if options.tune:
        steps.append(["finetune", members, *data, "--part", "training", *training, "--output", folder / "tuned"])
        members = folder / "tuned"
    average = ["--average-into", options.members] if options.fine_tunings is not None else []
    if options.tune_jointly:
        fused, teacher = folder / "fused", folder / "teacher"
        steps.append(["fuse", members, *average, *trunk, "--output", fused])
        steps.append(["fuse", members, *average, "--trunk-layers", 0, "--output", teacher])
        steps.append(["finetune", fused, "--teacher", teacher, *data, "--part", "training", *training])
        members, average, trunk = options.members_folder, [], []
        steps[-1] += ["--output", members]
    steps.append(["fuse", members, *average, *trunk, "--output", options.output])
    test = [*data, "--part", "test"]
    if options.test_data is not None or options.test_split is not None:
        test = ["--data", options.test_data or options.data, *given(*FOR_ALL_STEPS)]
        test += [] if options.test_split is None else ["--split", options.test_split]
    for group in ("near", "far"):
        test += [word for name, each in getattr(options, group) or [] for word in (f"--{group}", f"{name}={each}")]
    single = ["--compare", f"single={folder / 'finetuned' / 'member-0'}"]
    steps.append(["evaluate", options.output, *test, *given("limit"), *single, *common, *given("device")])
    return [[str(word) for word in words] for words in steps]


def _is_done(output: Path, words: list[str]) -> bool:
    """Whether the Hydra, its evaluation, or what a step fuses on the way exists. Other steps find out themselves what they have
    done."""
    if words[0] == "evaluate":
        return (output / "evaluation" / "report.json").exists()
    is_fused = words[0] == "fuse" and (Path(words[-1]) / FUSE_SETTINGS).exists()
    return is_fused or (output / FUSE_SETTINGS).exists()


def _check_order(steps: list[list[str]], output: Path) -> None:
    """Refuses what a step has made of models that were removed since: it would be taken for made of those that replace them."""
    if (output / FUSE_SETTINGS).exists():
        return
    folders, missing = [Path(words[words.index("--output") + 1]) for words in steps if "--output" in words], None
    for folder in folders[:-1]:
        if missing is not None and folder.exists():
            raise ValueError(f"{folder} was made of models that are no longer in {missing}: remove it, too")
        missing = missing or (None if _is_finished(folder) else folder)


def _is_finished(folder: Path) -> bool:
    if (folder / FUSE_SETTINGS).exists():
        return True
    try:
        return bool(members_in(folder))
    except ValueError:
        return False


# Checks before the first step


def _check_fine_tunings(options: BuildOptions) -> None:
    if options.fine_tunings is None:
        return
    if options.trained <= options.members or options.trained % options.members:
        raise ValueError(
            f"--fine-tunings is {options.fine_tunings}, and --members is {options.members}: pass twice as many, or another "
            "multiple"
        )
    if options.trainings is not None:
        raise ValueError("--fine-tunings is for more trainings and --trainings for fewer: pass one of them")


def _check(pretrained: str, options: BuildOptions) -> None:
    is_pruned, ood_data = options.circuit_objective is not None, options.ood_data
    is_own_ood = ood_data and is_same_source(options.data, ood_data) and not options.ood_split
    has_no_trunk = not options.trunk_layers
    to_prune = "pass --ood-data, to choose heads by, or --objective acc"
    problems = [
        (options.members < 2, "--members is 1, which is not an ensemble: pass at least 2"),
        (
            options.fine_tunings is not None and is_pruned,
            "--fine-tunings averages whole models, and pruned ones keep different heads: leave out --ood-data and "
            "--objective",
        ),
        (
            options.tune_jointly and options.freeze_trunk,
            "--freeze-trunk makes merging exact, so there is nothing for --tune-jointly to mend: leave one of them out",
        ),
        (
            options.tune_jointly and not options.merged_layers,
            "--tune-jointly is for a Hydra with merged layers, and none are: pass --trunk-layers",
        ),
        (options.time_limit is not None, "--time-limit is for --target: pass that, too"),
        (
            options.budget == 0 and (ood_data or options.objective),
            "--budget 0 prunes nothing, so --ood-data and --objective have no effect: leave them out",
        ),
        (not is_pruned and options.budget, f"--budget is for pruning: {to_prune}"),
        (not is_pruned and options.tune, f"--tune is for pruned members, and nothing is pruned: {to_prune}"),
        (
            options.freeze_trunk and has_no_trunk,
            "--freeze-trunk is for a trunk, and there is none: pass --trunk-layers",
        ),
        (options.output.resolve().name == "single", "--output is single, a name of the evaluation: choose another"),
        (is_own_ood, f"--ood-data {ood_data} is the data itself: pass other data, or an --ood-split of it"),
    ]
    for is_met, sentence in problems:
        if is_met:
            raise ValueError(sentence)
    if options.trainings is not None:
        check_trainings(options.trainings, options.members, "--trainings", or_more=False)
    if options.classifiers is not None:
        check_classifiers(
            options.classifiers, fine_tunings_within(options.trainings, options.trained), "--classifiers"
        )
    config = load_config(pretrained)
    check_trainable(pretrained, config)
    check_trunk(options.trunk_layers, pretrained, config)
    if is_pruned:
        MemberPlan(
            num_models=options.members,
            has_ood_data=options.ood_data is not None,
            budget=options.budget,
            objectives=[options.circuit_objective],
            trunk_layers=options.trunk_layers or 0,
            mode=options.mode,
        ).check_heads(config, pretrained)
    _check_output(options)
    device_named(options.device)
    _check_data(pretrained, options, config)


def _check_output(options: BuildOptions) -> None:
    """Refuses a folder that holds anything but this build's Hydra."""
    output = options.output
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        count = 1 if options.tune_jointly else options.trained
        names = [str(options.members_folder / f"member-{index}") for index in range(count)]
        record = output / FUSE_SETTINGS
        if not record.exists() or read_settings(record).get("made_of") != digest_of_names(names):
            raise ValueError(f"{output} exists already: pass another --output, or remove it")
    check_takes_files(output)


def _check_data(pretrained: str, options: BuildOptions, config: PreTrainedConfig) -> None:
    """Opens every set but the training data, to find mistakes before the training."""
    is_own_split = options.test_data is None and options.test_split is not None
    if is_own_split and overlap(options.split or "train", options.test_split):
        raise ValueError(f"--test-split {options.test_split} has rows that are trained on: pass another")
    processor = load_processor(options.processor or pretrained, config)
    is_joint = options.tune_jointly
    if is_joint and name_classes(copy.deepcopy(config), options, "training", options.regression)[1] is not None:
        raise ValueError(
            f"--tune-jointly learns from a teacher, which is for one class per row, and {options.data} has other labels: leave it out"
        )
    sets = [(options.ood_data, options.ood_split)] if options.ood_data else []
    if options.test_data or options.test_split:
        sets.append((options.test_data or options.data, options.test_split))
    sets += [(source, None) for group in ("near", "far") for _, source in getattr(options, group) or []]
    few = replace(options, limit=2)
    for name, split in sets:
        few.read(config, processor, name, split, labelled=False, prefer=SPLITS_TO_CUT, quiet=True)


# --target


def _build_for_target(models: list[str], options: BuildOptions) -> None:
    from ..search import hydrate
    from ..search.sources import has_classifier

    for field in fields(BuildOptions):
        if field.name in CHOSEN_BY_TARGET and getattr(options, field.name) != field.default:
            flag = f"--{field.name.replace('_', '-')}"
            raise ValueError(f"{flag} is not for --target, which decides by itself: leave one of them out")
    if options.ood_split is not None and options.ood_data is None:
        raise ValueError("--ood-split is a split of --ood-data: pass that, too")
    names = models_named(models)
    configs = [load_config(name) for name in names]
    check_takes_files(options.output)
    device = device_named(options.device)
    for name, config in zip(names, configs, strict=True):
        check_trainable(name, config)
    processor = load_processor(options.processor or names[0], configs[0])
    if options.processor is None:
        check_same_processors(names, configs, processor)
    is_pretrained = len(names) == 1 and not has_classifier(names[0])
    data = (_data_to_finetune if is_pretrained else _data_to_choose_by)(names[0], options, configs[0], processor)
    processor = data.pop("processor", processor)
    found = hydrate(
        names[0] if is_pretrained else names,
        ood_data=_ood_data(options, configs[0], processor),
        target=options.target,
        output_dir=options.output,
        processor=processor,
        num_members=options.members,
        trainings=options.fine_tunings or options.trainings,
        batch_size=options.batch_size,
        seed=options.seed,
        time_limit=options.time_limit,
        device=device,
        card=_names_on_the_hub(options.data, names),
        **data,
    )
    print(f"\n{found.to_markdown()}")
    print(f"The Hydra is in {options.output}, the steps are in {options.steps_folder}.")
    part = "--part test" if is_pretrained else "..."
    print(
        f"Next, on rows that the search has not seen: hydra-transformers evaluate {options.output} --data {options.data} {part}"
    )


def _data_to_finetune(name: str, options: BuildOptions, config: PreTrainedConfig, processor: Any) -> dict[str, Any]:
    """For a pre-trained model: one part of the data to train on, one to choose by; the part for tests is not read."""
    remember_max_length(processor, config, options.max_length, TEXT_TOKENS)
    classes, problem_type = name_classes(config, options, regression=options.regression)
    if problem_type == TOKEN_CLASSIFICATION:  # whose tokenizer has to read lists of words
        processor = load_processor(options.processor or name, config)
        remember_max_length(processor, config, options.max_length, TEXT_TOKENS)
    train, held_out = (
        options.read(config, processor, split=options.split, part=part) for part in ("training", "validation")
    )
    check_has_variety(train, options.data, "to learn")
    recipe = recipe_for(options.recipe, config, train, True, options.epochs, options.max_steps)
    return {
        "train_data": replace(train, change=change_by(train, recipe)),
        "data": held_out,
        "class_names": classes,
        "problem_type": problem_type,
        "processor": processor,
        "recipe": recipe,
        "tuning_recipe": recipe_for(None, config, train, False, max_steps=options.max_steps),
        "training_arguments": {"report_to": options.report_to},
    }


def _data_to_choose_by(name: str, options: BuildOptions, config: PreTrainedConfig, processor: Any) -> dict[str, Any]:
    """For fine-tuned models, which are not trained."""
    unused = [
        *options.given("recipe", "epochs", "max_steps"),
        *(["--report-to"] if options.report_to != "none" else []),
        *(["--regression"] if options.regression else []),
    ]
    if unused:
        raise ValueError(f"{unused[0]} is for training, and {name} is fine-tuned already: leave it out")
    return {"data": options.read(config, processor, split=options.split)}


def _ood_data(options: BuildOptions, config: PreTrainedConfig, processor: Any) -> dict[str, dict[str, Any]] | None:
    def read(name: str, split: str | None = None) -> Any:
        return options.read(config, processor, name, split, labelled=False, prefer=SPLITS_TO_CUT)

    found = {group: {name: read(data) for name, data in getattr(options, group) or []} for group in ("near", "far")}
    if options.ood_data is not None:
        found["OOD"] = {Path(options.ood_data).name: read(options.ood_data, options.ood_split)}
    return {group: sets for group, sets in found.items() if sets} or None


def _names_on_the_hub(data: str, names: list[str]) -> dict[str, str]:
    """The data and the model, for the card; folders have no name there."""
    card = {}
    if not Path(data).exists():
        card["dataset"] = data.partition(":")[0]
    if len(names) == 1 and not Path(names[0]).exists():
        card["base_model"] = names[0]
    return card
