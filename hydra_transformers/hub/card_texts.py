"""The texts and code of a card that depend on the model's task."""

from dataclasses import dataclass, replace
from string import Template
from typing import Any


PROBABILITY_FIELDS = """The pipeline gives `label`, `score`, `uncertainty` (the total), `aleatoric`, `epistemic`, `scores`, and where the model is calibrated
`abstain` and `prediction_set`.

- `total`: entropy of the mean probability, in nats. High: do not rely on the answer.
- `aleatoric`: each member by itself is unsure: the input is ambiguous.
- `epistemic`: the members contradict each other: the input is unlike the training data."""
PROBABILITY_CODE = """
members = outputs.member_logits.softmax(-1)  # (batch, members, classes)
mean = members.mean(1)
total = torch.special.entr(mean).sum(-1)
aleatoric = torch.special.entr(members).sum(-1).mean(1)
epistemic = total - aleatoric
"""
SNIPPET = Template("""
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
INTENDED_USE = """{subject}, where a wrong answer given with confidence is worse than no answer: sort out inputs with high total uncertainty for a person to look at, and inputs with high epistemic uncertainty as unlike the training data.

Not meant for decisions about people or for safety-critical use without tests on your own data."""
LIMITS = """- Uncertainty is relative to the data the model was trained and evaluated on. An unusual input can still get a confident answer.
- The members come from one pre-trained model and share most of their weights: where it is wrong, all of them may be.
- Confidence is calibrated only as far as the evaluation shows. For new data, calibrate it on a validation set.
- {limit}"""


@dataclass(frozen=True)
class CardTask:
    """
    pipeline_tag: the Hub's name of the task
    subject, limit: what the model does, and its own limit, as parts of the card's texts
    model_class, processor_class, processor: the Auto classes that load it, and a name for the processor
    imports, setup, example, inputs: code of the snippet: how an input comes about, and how it is prepared
    prediction, shown: code of what is printed
    logits_name, logits_are: the output that holds the ensemble's prediction, and what that is
    uncertainty: code from the members' logits to `mean`, `total`, `aleatoric` and `epistemic`
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
    answer_fields: str = PROBABILITY_FIELDS
    uncertainty: str = PROBABILITY_CODE

    @property
    def intended_use(self) -> str:
        return INTENDED_USE.format(subject=self.subject)

    @property
    def limits(self) -> str:
        return LIMITS.format(limit=self.limit)

    def snippet(self, repo_id: str) -> str:
        """Code that runs as it is, for a Hydra in this repository."""
        classes = ", ".join(sorted([self.model_class, self.processor_class]))
        return SNIPPET.substitute(vars(self), classes=classes).replace("REPO", repo_id).strip()


IMAGES = CardTask(
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
TEXTS = CardTask(
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
TOKENS = replace(
    TEXTS,
    pipeline_tag="token-classification",
    subject="Token classification, such as named entities, over the classes in `config.id2label`",
    limit="Entities of types that it does not know are not found, or taken for those that it knows.",
    model_class="AutoModelForTokenClassification",
    example='"Anna Smith went to Paris."',
    inputs='inputs = tokenizer("Anna Smith went to Paris.", return_tensors="pt")',
    prediction="[model.config.id2label[tag] for tag in mean[0].argmax(-1).tolist()]",
    shown='f"epistemic {epistemic.max().item():.3f} nats at most"',
    answer_fields="""The pipeline gives `entities`, each with `entity_group`, `word`, `start`, `end`, `score`, the `uncertainty` (the total), `aleatoric` and
`epistemic` of its least sure word, and where the model is calibrated `abstain`. Transformers' own `token-classification` pipeline runs
it, too, with every `aggregation_strategy`.""",
)
AUDIO = CardTask(
    pipeline_tag="audio-classification",
    subject="Audio classification over the classes in `config.id2label`",
    limit="It always answers with one of its classes, also where none of them can be heard.",
    model_class="AutoModelForAudioClassification",
    processor_class="AutoFeatureExtractor",
    processor="extractor",
    imports="import numpy as np\nimport torch",
    setup="\naudio = np.zeros(16_000, dtype=np.float32)  # a waveform at the extractor's sampling rate",
    example="audio",
    inputs='inputs = extractor(audio, sampling_rate=extractor.sampling_rate, return_tensors="pt")',
)
ZERO_SHOT = replace(
    IMAGES,
    pipeline_tag="zero-shot-image-classification",
    subject="Zero-shot image classification with class names of your choice",
    limit="Predictions and uncertainty depend on the prompts: the classes you name are the only ones it knows of.",
    model_class="AutoModelForZeroShotImageClassification",
    processor_class="AutoProcessor",
    setup='\nlabels = ["cat", "dog", "boat"]\ntemplate = "A photo of a {}."',
    example='"photo.jpg", candidate_labels=labels, hypothesis_template=template',
    inputs="""prompts = [template.format(label) for label in labels]
inputs = processor(text=prompts, images=Image.open("photo.jpg").convert("RGB"), return_tensors="pt", padding=True)""",
    prediction="labels[mean.argmax(-1).item()]",
    logits_name="logits_per_image",
)
# SigLIP says for each pair of an image and a text by itself whether they belong together.
PAIRS = replace(
    ZERO_SHOT,
    limit="Each text is scored by itself: the probabilities of several need not add up to 1. They, and the uncertainty, depend "
    "on the prompts, which must be padded to full length as in training.",
    inputs=ZERO_SHOT.inputs.replace("padding=True", 'padding="max_length", max_length=64'),
    logits_are="the logit of the members' mean probability that image and text belong together",
    uncertainty="""
members = outputs.member_logits.sigmoid()  # (images, members, texts): whether a text belongs to an image
mean = members.mean(1)
yes_or_no = torch.stack([members, 1 - members], -1)
total = torch.special.entr(yes_or_no.mean(1)).sum((-2, -1))  # over all texts
aleatoric = torch.special.entr(yes_or_no).sum((-2, -1)).mean(1)
epistemic = total - aleatoric
""",
)
MULTI_LABEL = {
    "limit": "Labels that it does not know are not noticed, and a label is decided on without regard to the others.",
    "logits_are": "the log-odds of the members' mean probability of each label",
    "answer_fields": """The pipeline gives `labels` (those answered with yes), `scores` (of each label its probability, `uncertainty`, `aleatoric` and
`epistemic`), `uncertainty`, `aleatoric` and `epistemic` (their sums), and where the model is calibrated `abstain` and
`prediction_set` (the labels that the input may have).""",
    "uncertainty": """
members = outputs.member_logits.sigmoid()  # (batch, members, labels)
mean = members.mean(1)
total = torch.special.entr(mean) + torch.special.entr(1 - mean)
aleatoric = (torch.special.entr(members) + torch.special.entr(1 - members)).mean(1)
epistemic = total - aleatoric
""",
    "prediction": "[model.config.id2label[label] for label in (mean[0] >= 0.5).nonzero().flatten().tolist()]",
    "shown": 'f"epistemic {epistemic.sum().item():.3f} nats"',
}
REGRESSION = {
    "limit": "It always answers with a number, also for inputs that have none.",
    "answer_fields": """The pipeline gives `label` and `score` (the number), `uncertainty` (the variance between members), `scores` with all
outputs, and where the model is calibrated `interval` and `abstain`.

- `spread`: the standard deviation between members. High: the input is unlike the training data.""",
    "uncertainty": """
members = outputs.member_logits  # (batch, members, outputs)
mean = outputs.logits
spread = members.std(1, correction=0)
""",
    "prediction": "mean.squeeze(0).tolist()",
    "shown": '"spread between members:", spread.squeeze(0).tolist()',
}
NOISE = "\n- `member_variances`: the noise that each member expects in the data; their mean is `aleatoric`, and part of `uncertainty`."
TASKS = {task.model_class: task for task in (AUDIO, IMAGES, TEXTS, TOKENS, ZERO_SHOT)}


def for_problem(task: CardTask, config: Any) -> CardTask:
    """The texts of a task for the `problem_type` of a model's config."""
    if config.problem_type == "multi_label_classification":
        subject = task.subject.replace("over the classes", "with any number of the labels")
        return replace(task, subject=subject, **MULTI_LABEL)
    if config.problem_type != "regression":
        return task
    inputs, aggregate = task.subject.partition(" ")[0].lower(), getattr(config, "aggregate", None)
    subject, logits_are = (
        f"Regression from {inputs}: the numbers in `config.id2label`",
        "the mean of the members' numbers",
    )
    if aggregate is not None:
        subject, logits_are = f"A score from {inputs}: rewards and reranking", f"{aggregate!r} of the members' scores"
    task = replace(task, subject=subject, logits_are=logits_are, **REGRESSION)
    if getattr(config, "predicts_variance", False):
        task = replace(task, answer_fields=task.answer_fields + NOISE)
    return task
