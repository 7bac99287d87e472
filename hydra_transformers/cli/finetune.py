"""`finetune`: a Hydra of a pre-trained model in one run, or pruned members one by one."""

from dataclasses import replace
from pathlib import Path

from .._io.access import access_to
from .._io.processes import on_one_process
from ..data.image_changes import random_changes
from ..data.loading import remember_max_length
from ..data.processors import load_processor
from ..fusion.probe import TEXT_TOKENS
from ..hub.member_heads import copy_circuits
from ..training import RECIPES, Recipe, finetune_members
from ..training import finetune as finetune_in_one_run
from . import flags
from .folders import are_fine_tunings, claim_for_training, load_config, load_model, members_in
from .options import argument, choice, layers_or_share, option


def finetune(
    model: argument(
        str,
        "DIR_OR_MODEL",
        "a pre-trained model, by folder or Hub name, which becomes a Hydra with new classifiers for the classes of the data; or "
        "the output of `prune`",
    ),
    data: flags.PartOptions,
    output: option(Path, "gets the trained model; run again to continue after a stop", "DIR"),
    recipe: option(choice(sorted(RECIPES)) | None, "of pruned members: the paper's (default: ours)") = None,
    members: option(int, "members of the Hydra", "M", min=1) = 3,
    trunk_layers: option(
        float, "leading layers that run once for all members: a number, or a share", "N", parser=layers_or_share
    ) = 0.75,
    learning_rate: option(float | None, "the peak learning rate of the trunk (default: 2.5e-5)", "LR") = None,
    validation_split: option(str | None, "default: the one of that name, or a random tenth of the rows") = None,
    epochs: flags.Epochs = None,
    max_steps: flags.MaxSteps = None,
    regression: flags.Regression = False,
    report_to: flags.ReportTo = "none",
    seed: flags.Seed = 0,
    batch_size: flags.BatchSize = 32,
) -> None:
    """Fine-tune a pre-trained model as a Hydra in one run, or pruned members one by one."""
    if epochs is not None and max_steps is not None:
        raise ValueError("--epochs and --max-steps are both lengths of a training: pass one of them")
    if data.part not in (None, "training"):
        raise ValueError(f"--part {data.part} is held out from training: leave it out")
    source = Path(model)
    arguments = {"report_to": report_to} | ({} if max_steps is None else {"max_steps": max_steps})
    if source.is_dir() and not (source / "config.json").exists():
        arguments |= {} if learning_rate is None else {"learning_rate": learning_rate}
        arguments |= {} if epochs is None else {"num_train_epochs": epochs}
        finetune_pruned(source, data, output, recipe, validation_split, seed, batch_size, arguments)
        return
    if recipe is not None:
        raise ValueError(f"--recipe is for pruned members, and {model} is a single model: leave it out")
    config = load_config(model)
    with access_to(data.data, "data set"):
        result = finetune_in_one_run(
            model,
            data.data,
            output,
            num_members=members,
            trunk_layers=trunk_layers,
            learning_rate=learning_rate,
            epochs=epochs,
            batch_size=batch_size,
            split=data.split,
            validation_split=validation_split,
            limit=data.limit,
            image=data.image_column,
            audio=data.audio_column,
            text=data.text_column,
            label=data.label_column,
            label_separator=data.label_separator,
            regression=regression,
            max_length=data.max_length,
            processor=data.processor and load_processor(data.processor, config),
            seed=seed,
            **arguments,
        )
    print(*result.train.notes, sep="\n")
    print(f"{len(result.train):,} rows to train, {len(result.validation):,} to validate, {len(result.test):,} to test")
    print(f"Next: hydra-transformers calibrate {output} --data {data.data} --part validation --output ...")


def finetune_pruned(
    source: Path,
    data: flags.PartOptions,
    output: Path,
    recipe: str | None,
    validation_split: str | None,
    seed: int,
    batch_size: int,
    arguments: dict,
) -> None:
    """Fine-tunes the members that `prune` left in `source`."""
    folders = members_in(source)
    config = load_config(str(folders[0]))
    on_one_process(lambda: claim_for_training(output, source, len(folders), are_fine_tunings(source)))
    processor = load_processor(data.processor or str(folders[0]), config)
    remember_max_length(processor, config, data.max_length, TEXT_TOKENS)
    train = data.read(config, processor, split=data.split, part="training")
    validation = data.read(
        config, processor, split=validation_split or data.split, part=None if validation_split else "validation"
    )
    chosen = RECIPES[recipe] if recipe else Recipe("default")
    if train.kind == "image":
        train = replace(train, change=random_changes(chosen.train_transforms)[0])
    on_one_process(lambda: copy_circuits(source, output))
    finetune_members(
        [load_model(str(folder)) for folder in folders],
        chosen,
        train,
        validation,
        output,
        seed=seed,
        processing_class=processor,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        **arguments,
    )
    print(f"Next: hydra-transformers fuse {output} --output ...")
