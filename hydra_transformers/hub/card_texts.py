"""The texts and code of a card that depend on the model's task."""

from dataclasses import dataclass, replace
from string import Template
from typing import Any


@dataclass(frozen=True)
class Task:
    """
    pipeline_tag: the Hub's name of the task
    subject, limit: what the model does, and its own limit, as parts of the card's texts
    model_class, processor_class, processor: the Auto classes that load it, and a name for the processor
    imports, setup, example, inputs: code of the snippets: how an input comes about, and how it is prepared
    prediction: code for the label of the mean
    logits_name, logits_are: the output that holds the ensemble's answer, and what that is
    decomposed: the call of this package that computes what the snippet does
    uncertainty: code from the members' logits to `mean`, `total`, `aleatoric` and `epistemic`
    shown: code of what is printed behind the prediction
    answer_fields: what the pipeline's answers hold
    """

    pipeline_tag: str
    subject: str
    limit: str
    model_class: str
    processor_class: str
    processor: str
    imports: str
    example: str
    inputs: str
    setup: str = ""
    prediction: str = "model.config.id2label[mean.argmax(-1).item()]"
    shown: str = 'f"{mean.max():.0%}, epistemic {epistemic.item():.3f} nats"'
    logits_name: str = "logits"
    logits_are: str = "the log of the members' mean probability"
    decomposed: str = "decompose(outputs.member_logits)"
    answer_fields: str = """The pipeline gives `label`, `score`, `uncertainty` (the total), `aleatoric`, `epistemic`, `scores`, and where the model is calibrated
`abstain` and `prediction_set`.

- `total`: entropy of the mean probability, in nats. High: do not rely on the answer.
- `aleatoric`: each member by itself is unsure: the input is ambiguous.
- `epistemic`: the members contradict each other: the input is unlike the training data."""
    uncertainty: str = """
members = outputs.member_logits.softmax(-1)  # (batch, members, classes)
mean = members.mean(1)
total = torch.special.entr(mean).sum(-1)
aleatoric = torch.special.entr(members).sum(-1).mean(1)
epistemic = total - aleatoric
"""

    @property
    def intended_use(self) -> str:
        return (
            f"{self.subject}, where a wrong answer given with confidence is worse than no answer: sort out inputs with high total "
            "uncertainty for a person to look at, and inputs with high epistemic uncertainty as unlike the training data.\n\n"
            "Not meant for decisions about people or for safety-critical use without tests on your own data."
        )

    @property
    def limits(self) -> str:
        one = "- The members come from one pre-trained model and share most of their weights: where it is wrong, all of them may be."
        return "\n".join([UNUSUAL, one, CALIBRATED, f"- {self.limit}"])

    def snippet(self, repo_id: str) -> str:
        """Code that runs as it is, for a Hydra in this repository."""
        classes = ", ".join(sorted([self.model_class, self.processor_class]))
        return HYDRA_SNIPPET.substitute(vars(self), classes=classes).replace("REPO", repo_id).strip()

    def baseline_snippet(self, repo_id: str) -> str:
        """The same for a baseline, which this package loads; one around two towers brings its own."""
        snippet = BASELINE_LOADING if self.logits_name == "logits_per_image" else BASELINE_SNIPPET
        return Template(snippet).substitute(vars(self)).replace("REPO", repo_id).strip()


UNUSUAL = (
    "- Uncertainty is relative to the data the model was trained and evaluated on. An unusual input can still get a confident "
    "answer."
)
CALIBRATED = "- Confidence is calibrated only as far as the evaluation shows. For new data, fit a temperature on a validation set."
BASELINE_LIMITS = "\n".join(
    [UNUSUAL, CALIBRATED, "- It always answers with one of its classes, also where none of them fits."]
)

HYDRA_SNIPPET = Template("""
$imports
from transformers import $classes, pipeline
$setup
answer = pipeline("hydra-$pipeline_tag", model="REPO", trust_remote_code=True)
print(answer($example))

# The same from the members' logits
$processor = $processor_class.from_pretrained("REPO")
model = $model_class.from_pretrained("REPO", trust_remote_code=True).eval()
$inputs
with torch.no_grad():
    outputs = model(**inputs)
$uncertainty
print($prediction, $shown)
""")

BASELINE_LOADING = """
from hydra_transformers.baselines import Baseline
from hydra_transformers.uncertainty import decompose

model = Baseline.from_pretrained("REPO")
"""
BASELINE_SNIPPET = f"""
$imports
from transformers import $processor_class
{BASELINE_LOADING}$processor = $processor_class.from_pretrained("REPO")$setup
$inputs
with torch.no_grad():
    outputs = model(**inputs)
found = decompose(outputs.member_logits)
print(model.config.id2label[found.prediction.item()], f"total {{found.total.item():.3f}}, epistemic {{found.epistemic.item():.3f}}")
"""

IMAGES = Task(
    pipeline_tag="image-classification",
    subject="Image classification over the classes in `config.id2label`",
    limit="It always answers with one of its classes, also where none of them is in the image.",
    model_class="AutoModelForImageClassification",
    processor_class="AutoImageProcessor",
    processor="processor",
    imports="import torch\nfrom PIL import Image",
    example='"photo.jpg"',
    inputs='inputs = processor(images=Image.open("photo.jpg").convert("RGB"), return_tensors="pt")',
)
TEXTS = Task(
    pipeline_tag="text-classification",
    subject="Text classification over the classes in `config.id2label`",
    limit="It always answers with one of its classes, also for texts about something else.",
    model_class="AutoModelForSequenceClassification",
    processor_class="AutoTokenizer",
    processor="tokenizer",
    imports="import torch",
    example='"A film that is worth your evening."',
    inputs='inputs = tokenizer("A film that is worth your evening.", return_tensors="pt")',
)
TOKENS = Task(
    pipeline_tag="token-classification",
    subject="Tags of words, such as named entities, over the classes in `config.id2label`",
    limit="Entities of kinds that it does not know are not found, or taken for those that it knows.",
    model_class="AutoModelForTokenClassification",
    processor_class="AutoTokenizer",
    processor="tokenizer",
    imports="import torch",
    example='"Anna Smith went to Paris."',
    inputs='inputs = tokenizer("Anna Smith went to Paris.", return_tensors="pt")',
    prediction="[model.config.id2label[tag] for tag in mean[0].argmax(-1).tolist()]",
    shown='f"epistemic {epistemic.max().item():.3f} nats at most"',
    answer_fields="""The pipeline gives `entities`, each with `entity_group`, `word`, `start`, `end`, `score`, the `uncertainty` (the total), `aleatoric` and
`epistemic` of its least sure word, and where the model is calibrated `abstain`. Transformers' own `token-classification` pipeline runs
it, too, with every `aggregation_strategy`.

- `total`: entropy of the mean probability of a word's tag, in nats. High: do not rely on this entity.
- `aleatoric`: each member by itself is unsure: the text is ambiguous.
- `epistemic`: the members contradict each other: the text is unlike the training data.""",
)
SOUNDS = Task(
    pipeline_tag="audio-classification",
    subject="Audio classification over the classes in `config.id2label`",
    limit="It always answers with one of its classes, also where none of them can be heard.",
    model_class="AutoModelForAudioClassification",
    processor_class="AutoFeatureExtractor",
    processor="extractor",
    imports="import numpy as np\nimport torch",
    setup="\nsound = np.zeros(16_000, dtype=np.float32)  # a waveform at the extractor's sampling rate",
    example="sound",
    inputs='inputs = extractor(sound, sampling_rate=extractor.sampling_rate, return_tensors="pt")',
)
ZERO_SHOT = Task(
    pipeline_tag="zero-shot-image-classification",
    subject="Zero-shot image classification with class names of your choice",
    limit="Answers and uncertainty depend on the prompts: the classes you name are the only ones it knows of.",
    model_class="AutoModelForZeroShotImageClassification",
    processor_class="AutoProcessor",
    processor="processor",
    imports="import torch\nfrom PIL import Image",
    setup='\nlabels = ["cat", "dog", "boat"]\ntemplate = "A photo of a {}."',
    example='"photo.jpg", candidate_labels=labels, hypothesis_template=template',
    inputs="""prompts = [template.format(label) for label in labels]
inputs = processor(text=prompts, images=Image.open("photo.jpg").convert("RGB"), return_tensors="pt", padding=True)""",
    prediction="labels[mean.argmax(-1).item()]",
    logits_name="logits_per_image",
)
# A model that says for each pair of an image and a text by itself whether they belong together.
PAIRS = replace(
    ZERO_SHOT,
    limit="Each text is scored by itself: the probabilities of several need not add up to 1. They, and the uncertainty, depend "
    "on the prompts, which must be padded to full length as in training.",
    inputs=ZERO_SHOT.inputs.replace("padding=True", 'padding="max_length", max_length=64'),
    logits_are="the logit of the members' mean probability that image and text belong together",
    decomposed='decompose(outputs.member_logits, "multi_label_classification")',
    uncertainty="""
members = outputs.member_logits.sigmoid()  # (images, members, texts): whether a text belongs to an image
mean = members.mean(1)
yes_or_no = torch.stack([members, 1 - members], -1)
total = torch.special.entr(yes_or_no.mean(1)).sum((-2, -1))  # over all texts
aleatoric = torch.special.entr(yes_or_no).sum((-2, -1)).mean(1)
epistemic = total - aleatoric
""",
)


def _of_several_labels(task: Task) -> Task:
    return replace(
        task,
        subject=task.subject.replace("over the classes", "with any number of the labels"),
        limit="Labels that it does not know are not noticed, and a label is decided on without regard to the others.",
        logits_are="the log-odds of the members' mean probability of each label",
        decomposed='decompose(outputs.member_logits, "multi_label_classification")',
        answer_fields="""The pipeline gives `labels` (those answered with yes), `scores` (of each label its probability, `uncertainty`, `aleatoric` and
`epistemic`), `uncertainty`, `aleatoric` and `epistemic` (their sums), and where the model is calibrated `abstain` and
`prediction_set` (the labels that the input may have).

- `total`: entropy of the mean probability of a label, in nats. High: do not rely on this label.
- `aleatoric`: each member by itself is unsure: the input is ambiguous.
- `epistemic`: the members contradict each other: the input is unlike the training data.""",
        uncertainty="""
members = outputs.member_logits.sigmoid()  # (batch, members, labels)
mean = members.mean(1)
total = torch.special.entr(mean) + torch.special.entr(1 - mean)
aleatoric = (torch.special.entr(members) + torch.special.entr(1 - members)).mean(1)
epistemic = total - aleatoric
""",
        prediction="[model.config.id2label[label] for label in (mean[0] >= 0.5).nonzero().flatten().tolist()]",
        shown='f"epistemic {epistemic.sum().item():.3f} nats"',
    )


def of_problem(task: Task, config: Any) -> Task:
    """The texts of a task as they are for the problem that the model solves, by its config."""
    if config.problem_type == "multi_label_classification":
        return _of_several_labels(task)
    if config.problem_type != "regression":
        return task
    kind = "texts" if task is TEXTS else "images" if task is IMAGES else "sounds"
    aggregate = getattr(config, "aggregate", None)
    noise = ""
    if getattr(config, "predicts_variance", False):
        noise = "\n- `member_variances`: the noise that each member expects in the data; their mean is `aleatoric` in answers, and part of `uncertainty`."
    return replace(
        task,
        subject=f"Numbers for {kind} (regression), those in `config.id2label`"
        if aggregate is None
        else f"A score for {kind}: rewards and reranking",
        limit="It always answers with a number, also for inputs that have none.",
        logits_are="the mean of the members' numbers"
        if aggregate is None
        else f"the members' scores as {aggregate!r} of them",
        decomposed="predict_uncertainty(model, [inputs])",
        answer_fields="""The pipeline gives `label` and `score` (the number), `uncertainty` (the variance between members), `scores` with all
outputs, and where the model is calibrated `interval` and `abstain`.

- `spread`: the standard deviation between members. High: the input is unlike the training data."""
        + noise,
        uncertainty="""
members = outputs.member_logits  # (batch, members, outputs)
mean = outputs.logits
spread = members.std(1, correction=0)
""",
        prediction="mean.squeeze(0).tolist()",
        shown='"spread between members:", spread.squeeze(0).tolist()',
    )


TASKS = {task.model_class: task for task in (SOUNDS, IMAGES, TEXTS, TOKENS, ZERO_SHOT)}
