"""What cannot be done is told in one sentence, with exit code 2, before any work and without a trace."""

import re
import shlex
import shutil

import datasets
import pytest
import torch
from transformers import ResNetConfig, ViTForImageClassification, ViTImageProcessorPil, ViTModel

from hydra_transformers import AutoHydra
from hydra_transformers.cli import build, card
from hydra_transformers.models.auto import load_trained
from hydra_transformers.pruning import member_plan
from hydra_transformers.search import hydration
from hydra_transformers.training import finetune
from tests.tiny_data import grey_rows, picture_rows, pictures, save_bert, save_clip, save_vit


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workplace")
    save_bert(folder / "bert")
    save_clip(folder / "clip")
    save_vit(folder / "cats", classes=["cat", "dog", "bird"])
    vit = load_trained(save_vit(folder / "vit"))
    AutoHydra.from_backbone(load_trained(folder / "clip")).save_pretrained(folder / "clips" / "member-0")
    for name in ("two", "encoder", "grey-vit", "bare", "same"):
        shutil.copytree(folder / "vit", folder / name)
    other = ViTForImageClassification.from_pretrained(folder / "vit")
    with torch.no_grad():
        other.classifier.weight += 0.1
    for name in ("two", "grey-vit"):
        other.save_pretrained(folder / name)
    ViTImageProcessorPil(size={"height": 8, "width": 8}, image_mean=[0.1] * 3).save_pretrained(folder / "grey-vit")
    ViTModel.from_pretrained(folder / "vit").save_pretrained(folder / "encoder")
    (folder / "bare" / "preprocessor_config.json").unlink()
    ResNetConfig().save_pretrained(folder / "resnet")
    (folder / "empty").mkdir()
    members = [AutoHydra.from_backbone(vit, {0: [head]}) for head in range(3)]
    for index, member in enumerate(members):
        for steps in ("pruned", "two-of-three"):
            if not (steps == "two-of-three" and index == 1):
                member.save_pretrained(folder / steps / f"member-{index}")
                shutil.copy(folder / "vit" / "preprocessor_config.json", folder / steps / f"member-{index}")
    AutoHydra.from_pruned_members(members).save_pretrained(
        shutil.copytree(folder / "vit", folder / "hydra", dirs_exist_ok=True)
    )
    (folder / "full" / "member-0").mkdir(parents=True)
    (folder / "full" / "member-0" / "config.json").write_text("{}")
    (folder / "file").write_text("")
    picture_rows(30).save_to_disk(folder / "pictures")
    picture_rows(30, names=["blue", "red", "green"]).save_to_disk(folder / "reordered")
    picture_rows(12).filter(lambda row: row["label"] == 0).save_to_disk(folder / "red")
    picture_rows(6, names=["red"]).save_to_disk(folder / "one-class")
    picture_rows(4, names=["red", "green"]).save_to_disk(folder / "two-classes")
    datasets.DatasetDict({"train": picture_rows(6), "test": picture_rows(6)}).save_to_disk(folder / "splits")
    grey_rows(16).save_to_disk(folder / "grey")
    grey_rows(1).save_to_disk(folder / "one-grey")
    pictures([0])[0].save(folder / "0.png")
    return folder


@pytest.fixture(autouse=True)
def no_work(monkeypatch):
    """Fails a test in which a training, an extraction or a search begins."""
    for module, names in (
        (member_plan, ("extract_circuit", "draw_members")),
        (finetune._FineTuning, ("_trained",)),
        (build, ("run_step",)),
        (card, ("load_model",)),
        (hydration, ("finetune_from_pretrained",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("work began"))


COMMANDS = {
    "prune": "prune vit --data pictures --output OUT",
    "prune several": "prune vit two --data pictures --ood-data grey --output OUT",
    "finetune": "finetune pruned --data pictures --recipe cifar100 --max-steps 1 --output OUT",
    "finetune pretrained": "finetune encoder --data pictures --output OUT",
    "fuse": "fuse --output OUT",
    "build": "build encoder --data pictures --max-steps 2 --output OUT",
    "target": "build encoder --data pictures --target balance --output OUT",
    "evaluate": "evaluate vit --data pictures --output OUT",
    "calibrate": "calibrate hydra --data pictures --output OUT",
    "analyse": "analyse vit --data pictures --ood grey=grey --output OUT",
    "predict": "predict",
    "app": "app vit",
    "": "",
}
LENGTHS = [
    ("--epochs 2 --max-steps 2", "--epochs and --max-steps are both lengths of a training"),
    ("--report-to nowhere", "--report-to nowhere is unknown or not installed: install it, or pass one of none"),
]
NOWHERE = "there is no device nowhere here"
REFUSED = {
    "prune": [
        ("--budget 8", "--budget is 8: 8 heads compete, so pass 1 to 7"),
        ("--budget 30 --out-of 40", "--budget is 30: 8 heads compete"),
        ("--budget 6 --out-of 3", "--out-of is 3: a member loses 6 of them, and 8 heads compete, so pass 6 to 7"),
        ("--budget 2 --out-of 8", "--out-of is 8: a member loses 2 of them"),
        ("--budget 7", "there are only 1 ways to lose 7 of 7 heads, for 3 members"),
        ("--budget 2 --out-of 2", "there are only 1 ways to lose 2 of 2 heads, for 3 members"),
        ("--budget best", "--budget is best, which is for members with a circuit each"),
        ("--heads-per-layer 2", "--heads-per-layer is for the method taylor"),
        ("--method taylor --budget 2", "--budget is for the method circuits"),
        ("--method taylor --budget best", "--budget is for the method circuits"),
        ("--method taylor --objectives acc", "--objectives is for the method circuits"),
        ("--method taylor --heads-per-layer 4", "--heads-per-layer is 4, of at most 4 heads in a layer"),
        ("--method taylor --mode shortlist", "--mode is for the method circuits"),
        ("--method taylor --score energy", "--score is for the method circuits"),
        ("--score energy", "the score energy is for the objectives ood and avg: leave it out, or name one of them"),
        ("--objectives acc acc", "--objectives has acc twice: name each once"),
        ("--objectives ood", "the objective ood needs out-of-distribution data: pass --ood-data"),
        ("--objectives avg acc", "the objective avg needs out-of-distribution data: pass --ood-data"),
        ("--trunk-layers 2", "--trunk-layers is 2, vit has 2 layers: pass 0 to 1, or there is nothing to prune"),
        ("--ood-split train", "--ood-split is a split of --ood-data"),
        ("--ood-data grey --objectives acc", "--ood-data is for the objectives ood and avg"),
        ("--ood-data grey --out-of 5", "--out-of is for a single objective, here are 3"),
        ("--ood-data pictures", "is the data itself"),
        ("--ood-data one-grey", "one-grey gives 1 row, too few to tell it from the data"),
        ("--limit 1", "gives 1 row, too few to choose heads by"),
        ("--data red", "all 4 rows of red have the same label, so there is nothing to choose heads by"),
        ("--data ./nothing", "there is no folder or file ./nothing"),
        ("--image-column photo", "no column 'photo': it has image, label"),
        ("--split train[:3]", r"has no splits: leave out the split 'train\[:3\]'"),
        ("--device nowhere", NOWHERE),
    ],
    "prune several": [
        ("--members 3", "--members is 3, and 2 models make one each"),
        ("--objectives acc avg", "--objectives has 2, and each of the 2 models gets one circuit"),
        ("--out-of 4", "--out-of is for members sampled from one circuit"),
        ("--budget 8", "--budget is 8: 8 heads compete"),
    ],
    "finetune": [
        *LENGTHS,
        ("--recipe sst2 --learning-rates grid", "sst2 has no grid"),
        ("--learning-rates grid 0.1", "has numbers and the word grid: pass either"),
        ("--learning-rates 0.1 1e-1", "--learning-rates has 0.1 twice"),
        ("--members 2", "--members is for a pre-trained model"),
        ("--output pruned", "is where the members are read from: pass another --output"),
        ("--output vit", "vit exists already: pass another --output"),
        ("--output full", "member-0 is not a fine-tuning"),
        ("--output file/out", "file/out cannot be written into .Not a directory: "),
        ("--data splits --validation-split train", "has rows of the training split train"),
        ("--data splits --validation-split train[:3]", "has rows of the training split train"),
        ("--data red", "all 4 rows of red have the same label, so there is nothing to learn"),
        ("--limit 1", "gives 1 row, too few to learn"),
    ],
    "finetune pretrained": [
        *LENGTHS,
        ("--part test", "--part test is held out from training"),
        ("--data one-class", "has 1 class, so there is nothing to learn"),
        ("--trunk-layers 3", "--trunk-layers is 3, encoder has 2 layers: pass 0 to 2"),
    ],
    "fuse": [
        ("vit", "holds no members"),
        ("./nothing", "there is no folder .?.?nothing"),
        ("two-of-three", "lacks a member, it has member-0, member-2"),
        ("vit bert", r"members\[1\] is a BertForSequenceClassification"),
        ("vit cats", r"members\[1\] has other classes than members\[0\] .number 0 is 'cat', not 'red'"),
        ("vit same", "same (heads and )?weights"),
        ("vit ./nothing", "there is no folder ./nothing"),
        ("vit encoder", "has no classifier.bias: pass a model that is trained"),
        ("vit grey-vit", "grey-vit prepares its inputs differently from vit .image_mean differs"),
        ("vit two --trunk-layers 3", "--trunk-layers is 3, vit has 2 layers"),
        ("vit two --trunk-layers 1.0", "1.0 is neither a number of layers nor a share of them below 1, such as 0.75"),
        ("vit two --shared --trunk-layers 1", "members enter a trunk as one, so shared has to name 'embeddings'"),
        ("vit two --output vit", "vit exists already: pass another --output"),
        ("vit two --output file/out", "file/out cannot be written into .Not a directory: "),
    ],
    "build": [
        *LENGTHS,
        ("--budget 2", "--budget is for pruning: pass --ood-data"),
        ("--tune", "--tune is for pruned members, and nothing is pruned"),
        ("--budget 0 --ood-data grey", "--budget 0 prunes nothing"),
        ("--budget 9 --ood-data grey", "--budget is 9: 8 heads compete"),
        ("--objective ood", "the objective ood needs out-of-distribution data"),
        ("--objective acc --ood-data grey", "--ood-data is for the objectives ood and avg"),
        ("--ood-data ./nothing", "there is no folder or file ./nothing"),
        ("--ood-data pictures", "is the data itself"),
        ("--near x=./nothing", "there is no folder or file ./nothing"),
        ("--near x=grey --near x=grey", "--near has x twice"),
        ("--test-split train", "--test-split train has rows that are trained on"),
        ("--members 1", "--members is 1, which is not an ensemble"),
        ("--trunk-layers 3", "--trunk-layers is 3, encoder has 2 layers: pass 0 to 2"),
        ("--trunk-layers 2 --objective acc", "has 2 layers: pass 0 to 1, or there is nothing to prune"),
        ("--trunk-layers 1 --objective acc --budget 4", "--budget is 4: 4 heads compete, so pass 1 to 3"),
        ("--freeze-trunk", "--freeze-trunk is for a trunk, and there is none"),
        ("--time-limit 5", "--time-limit is for --target"),
        ("--output full", "full exists already"),
        ("--output single", "--output is single, a name of the evaluation"),
        ("--device nowhere", NOWHERE),
    ],
    "target": [
        *LENGTHS,
        ("--budget 2", "--budget is not for --target, which decides by itself"),
        ("--trunk-layers 1", "--trunk-layers is not for --target"),
        ("--tune", "--tune is not for --target"),
        ("--target quality", "without --ood-data that is not measured"),
        ("--target cost=0", "cost 0, which nothing meets"),
        ("--ood-split train", "--ood-split is a split of --ood-data"),
        ("--near x=grey --near x=grey", "--near has x twice"),
    ],
    "evaluate": [
        ("--compare vit=two", "--compare calls another model vit, which is the name of vit: choose another name"),
        ("--compare a=two --compare a=vit", "--compare has a twice"),
        ("--compare other=cats", "other has other classes"),
        ("--near x=grey --near x=pictures", "--near has x twice: name each once"),
        ("--far x=grey --far x=grey", "--far has x twice: name each once"),
        ("--fit-data grey", "--fit-data is for scores that are fitted, msp is not"),
        ("--fit-split train", "--fit-split is for scores that are fitted, msp is not"),
        ("--score knn", "knn would be fitted on the rows that test it"),
        ("--score knn --fit-data pictures", "pass the training data with --fit-data or --fit-split"),
        ("--score mahalanobis --fit-data red", "all 4 rows of red have the same label"),
        ("--severities 1", "--severities is of --corruptions"),
        ("--output file/out", "file/out cannot be written into .Not a directory: "),
    ],
    "calibrate": [
        ("--risk 0.1 --coverage 0.9", "--risk and --coverage exclude each other: pass one of them"),
        ("--risk 5", "--risk is 5.0: pass a share between 0 and 1"),
        ("--label-risk 0.1", "--label-risk is for models of several labels, hydra is none"),
        ("--risk 0.1 --label-risk 0.1", "--risk and --label-risk exclude each other"),
        ("--data grey", "grey has no label column"),
        ("--tpr 0.9", "name them with --ood-data"),
        ("--confidence 0.9", "pass --risk, --coverage or --tpr, too"),
        ("--ood-data grey", "pass --risk, --coverage or --tpr, too"),
        ("--risk 0.1 --ood-data pictures", "is the data itself"),
        ("--training-data pictures", "msp is not fitted"),
        ("--limit 10", "data has 10 rows: pass at least 20"),
        ("--output full", "full exists already"),
    ],
    "analyse": [
        ("--ood same=pictures", "--ood same is the data itself"),
        ("--ood grey=grey", "--ood has grey twice"),
        ("--budgets 1 1", "--budgets has 1 twice"),
        ("--limit 4", "--ood grey gives 4 rows, too few"),
        ("--output full", "full exists already: pass another --output"),
    ],
    "predict": [
        ("./nowhere text", "there is no folder ./nowhere"),
        ("clip 0.png", "clip chooses among classes that you name: pass --labels"),
        ("clip 0.png --labels cat dog cat", "--labels has cat twice: name each once"),
        ("vit 0.png --labels red", "--labels is for CLIP and SigLIP, vit has its own classes"),
        ("bare 0.png", "bare has no ImageProcessor saved with it"),
        ("vit pictures", "pictures is a data set: name the file of its answers with --output"),
        ("bert file", "file is a file, and bert reads texts: pass the text itself, or - to read lines from stdin"),
        ("vit 0.png --strict", "--strict is for a data set: name the file of its answers with --output"),
        ("vit 0.png 0.png --output a.csv", "--output is for one data set, and there are 2 inputs"),
        ("vit pictures --output a.xls", "--output is a.xls: pass a file that ends in .parquet, .jsonl, .csv"),
        ("vit pictures --output a.csv --workers 2", "--workers is 2, which is for engine='ray'"),
        ("vit pictures --output a.csv --image-column photo", "no column 'photo': it has image"),
    ],
    "app": [
        ("--labels cat dog", "--labels is for CLIP and SigLIP"),
        ("--examples nowhere", "there are no examples"),
        ("--single bert", "bert reads texts, vit images: pass two of a kind"),
        ("--single cats", "cats has other classes than vit"),
    ],
    "": [
        ("app nowhere/at-all", "nowhere/at-all is not on this machine"),
        ("info ./nothing", "there is no folder ./nothing"),
        ("info empty", "has no config.json"),
        (
            "info resnet",
            "is a resnet: pass a hydra_albert, albert, hydra_ast, audio-spectrogram-transformer, hydra_beit, beit, hydra_bert",
        ),
        ("info vit", "is a plain vit: pass a Hydra"),
        ("card vit", "is a plain vit: pass a Hydra"),
        ("push vit me/vit", "is a plain vit: pass a Hydra"),
        ("benchmark vit", "is a plain vit: pass a Hydra"),
        ("benchmark hydra --batch-sizes 1 1", "--batch-sizes has 1 twice"),
        ("benchmark hydra --output empty", "--output empty is a folder: pass the name of a file"),
        ("export vit --output OUT", "is a plain vit: pass a Hydra"),
        ("export hydra --to onnx onnx --output OUT", "--to has onnx twice"),
        ("push hydra 'a b'", "repo_id is 'a b'"),
        ("card hydra --dataset ./data", "dataset is './data'"),
        ("card hydra --report-model x", "--report-model is a name in a report"),
        ("card hydra --report none.json", "there is no report none.json"),
        ("push hydra me/hydra --space-single me/single", "--space-single is about a page: name its Space"),
        ("prune encoder --data pictures --output OUT", "has no classifier.bias: pass a model that is trained"),
        (
            "prune bare --data pictures --output OUT",
            "bare has no ImageProcessor saved with it: name another .*--processor",
        ),
        ("prune hydra --data pictures --output OUT", "is a Hydra of 3 members: pass the backbone, or one member"),
        ("prune bert --data two-classes --output OUT", "no text column among image, label"),
        ("prune vit same --data pictures --output OUT", "same (heads and )?weights"),
        ("prune vit bert --data pictures --output OUT", r"MODEL\[1\] is a BertForSequenceClassification"),
        ("prune vit cats --data pictures --output OUT", r"MODEL\[1\] has other classes than MODEL\[0\]"),
        ("prune vit grey-vit --data pictures --output OUT", "grey-vit prepares its inputs differently from vit"),
        ("prune vit hydra --data pictures --output OUT", "is a Hydra of 3 members"),
        ("finetune clips --data pictures --output OUT", "has two towers and no classifier to train.*`fuse`"),
        ("finetune pruned/member-0 --data pictures --output OUT", "is a single Hydra: pass a pre-trained model"),
        ("build vit two --data pictures --output OUT", "several models are for --target"),
        ("build vit two --data pictures --target balance --max-steps 2 --output OUT", "--max-steps is for training"),
        ("evaluate pruned --data pictures", "fuse them first"),
        (
            "evaluate cats --data pictures",
            "has the class 'red', which the model does not know .it knows cat, dog, bird",
        ),
        ("calibrate ./nowhere --data pictures --output OUT", "there is no folder ./nowhere"),
        ("calibrate vit --data pictures --sets raps --output OUT", "k_reg is 5, there are 3 classes"),
        (
            "calibrate clip --data pictures --detector she --training-data reordered --output OUT",
            "reordered has other classes than pictures: fit the detector on the same classes",
        ),
    ],
}


@pytest.mark.parametrize(
    ("command", "words", "sentence"),
    [(command, *row) for command, rows in REFUSED.items() for row in rows],
    ids=lambda value: None,
)
def test_it_is_refused(command, words, sentence, workplace, tmp_path, fails, monkeypatch):
    monkeypatch.chdir(workplace)
    line = f"{COMMANDS[command]} {words}".replace("OUT", str(tmp_path / "out"))
    assert re.search(sentence, fails(*shlex.split(line)))
    assert not list((tmp_path / "out").glob("member-*")) and not (tmp_path / "out" / "config.json").exists()
    assert not (tmp_path / "out-steps").exists()
