"""Texts and code of a card that depend on the model's task."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """
    pipeline_tag: the Hub's name of the task
    logits_name, logits_are: the output that holds the ensemble's answer, and what that is
    decomposed: how this package computes what `snippet` does
    intended_use, limits: text that the publisher may rewrite
    snippet: code that runs as it stands, with REPO for the repository
    """

    pipeline_tag: str
    logits_name: str
    intended_use: str
    limits: str
    snippet: str
    logits_are: str = "the log of the members' mean probability"
    decomposed: str = "decompose(outputs.member_logits)"


UNCERTAINTY = """
members = outputs.member_logits.softmax(-1)  # (batch, members, classes)
mean = members.mean(1)
total = torch.special.entr(mean).sum(-1)
aleatoric = torch.special.entr(members).sum(-1).mean(1)
epistemic = total - aleatoric
"""

UNCERTAINTY_OF_PAIRS = """
members = outputs.member_logits.sigmoid()  # (images, members, texts): whether a text belongs to an image
mean = members.mean(1)
yes_or_no = torch.stack([members, 1 - members], -1)
total = torch.special.entr(yes_or_no.mean(1)).sum((-2, -1))  # over all texts
aleatoric = torch.special.entr(yes_or_no).sum((-2, -1)).mean(1)
epistemic = total - aleatoric
"""

USE = (
    "{task}, where a wrong answer given with confidence is worse than no answer: sort out inputs with high total "
    "uncertainty for a person to look at, and inputs with high epistemic uncertainty as unlike the training data.\n\n"
    "Not meant for decisions about people or for safety-critical use without tests on your own data."
)

LIMITS = (
    "- Uncertainty is relative to the data the model was trained and judged on. An unusual input can still get a confident "
    "answer.\n"
    "- The members come from one pre-trained model and share most of their weights: where it is wrong, all of them may be.\n"
    "- Confidence is calibrated only as far as the evaluation shows. For new data, fit a temperature on a validation set.\n"
    "- {own}"
)

ANSWER = """
answer = pipeline("hydra-{task}", model="REPO", trust_remote_code=True)
print(answer({inputs}))

# The same from the members' logits
"""

IMAGES = Task(
    pipeline_tag="image-classification",
    logits_name="logits",
    intended_use=USE.format(task="Image classification over the classes in `config.id2label`"),
    limits=LIMITS.format(own="It always answers with one of its classes, also where none of them is in the image."),
    snippet=f"""
import torch
from PIL import Image
from transformers import AutoModelForImageClassification, AutoProcessor, pipeline
{ANSWER.format(task="image-classification", inputs='"photo.jpg"')}processor = AutoProcessor.from_pretrained("REPO")
model = AutoModelForImageClassification.from_pretrained("REPO", trust_remote_code=True).eval()
inputs = processor(images=Image.open("photo.jpg").convert("RGB"), return_tensors="pt")
with torch.no_grad():
    outputs = model(**inputs)
{UNCERTAINTY}
print(model.config.id2label[mean.argmax(-1).item()], f"{{mean.max():.0%}}, epistemic {{epistemic.item():.3f}} nats")
""",
)

TEXTS = Task(
    pipeline_tag="text-classification",
    logits_name="logits",
    intended_use=USE.format(task="Text classification over the classes in `config.id2label`"),
    limits=LIMITS.format(own="It always answers with one of its classes, also for texts about something else."),
    snippet=f"""
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline
{ANSWER.format(task="text-classification", inputs='"A film that is worth your evening."')}tokenizer = AutoTokenizer.from_pretrained("REPO")
model = AutoModelForSequenceClassification.from_pretrained("REPO", trust_remote_code=True).eval()
inputs = tokenizer("A film that is worth your evening.", return_tensors="pt")
with torch.no_grad():
    outputs = model(**inputs)
{UNCERTAINTY}
print(model.config.id2label[mean.argmax(-1).item()], f"{{mean.max():.0%}}, epistemic {{epistemic.item():.3f}} nats")
""",
)

AUDIO = Task(
    pipeline_tag="audio-classification",
    logits_name="logits",
    intended_use=USE.format(task="Audio classification over the classes in `config.id2label`"),
    limits=LIMITS.format(own="It always answers with one of its classes, also where none of them is to be heard."),
    snippet=f"""
import numpy as np
import torch
from transformers import AutoFeatureExtractor, AutoModelForAudioClassification, pipeline

sound = np.zeros(16_000, dtype=np.float32)  # a waveform at the extractor's sampling rate{ANSWER.format(task="audio-classification", inputs="sound")}extractor = AutoFeatureExtractor.from_pretrained("REPO")
model = AutoModelForAudioClassification.from_pretrained("REPO", trust_remote_code=True).eval()
inputs = extractor(sound, sampling_rate=extractor.sampling_rate, return_tensors="pt")
with torch.no_grad():
    outputs = model(**inputs)
{UNCERTAINTY}
print(model.config.id2label[mean.argmax(-1).item()], f"{{mean.max():.0%}}, epistemic {{epistemic.item():.3f}} nats")
""",
)

LABELLED = '"photo.jpg", candidate_labels=labels, hypothesis_template=template'
ZERO_SHOT_SNIPPET = f"""
import torch
from PIL import Image
from transformers import AutoModelForZeroShotImageClassification, AutoProcessor, pipeline

labels = ["cat", "dog", "boat"]
template = "A photo of a {{}}."{ANSWER.format(task="zero-shot-image-classification", inputs=LABELLED)}processor = AutoProcessor.from_pretrained("REPO")
model = AutoModelForZeroShotImageClassification.from_pretrained("REPO", trust_remote_code=True).eval()
prompts = [template.format(label) for label in labels]
inputs = processor(text=prompts, images=Image.open("photo.jpg").convert("RGB"), return_tensors="pt", PADDING)
with torch.no_grad():
    outputs = model(**inputs)
UNCERTAINTY
print(labels[mean.argmax(-1).item()], f"{{mean.max():.0%}}, epistemic {{epistemic.item():.3f}} nats")
"""
ZERO_SHOT = Task(
    pipeline_tag="zero-shot-image-classification",
    logits_name="logits_per_image",
    intended_use=USE.format(task="Zero-shot image classification with class names of your choice"),
    limits=LIMITS.format(
        own="Answers and uncertainty depend on the prompts: the classes you name are the only ones it knows of."
    ),
    snippet=ZERO_SHOT_SNIPPET.replace("PADDING", "padding=True").replace("UNCERTAINTY", UNCERTAINTY),
)
# Of a model that says of each pair of an image and a text by itself whether they belong together.
PAIRS = Task(
    pipeline_tag=ZERO_SHOT.pipeline_tag,
    logits_name=ZERO_SHOT.logits_name,
    intended_use=ZERO_SHOT.intended_use,
    limits=LIMITS.format(
        own="Each text is judged by itself: the probabilities of several need not add up to 1. They, and the uncertainty, depend "
        "on the prompts, which are to be padded to full length as in training."
    ),
    snippet=ZERO_SHOT_SNIPPET.replace("PADDING", 'padding="max_length", max_length=64').replace(
        "UNCERTAINTY", UNCERTAINTY_OF_PAIRS
    ),
    logits_are="the logit of the members' mean probability that image and text belong together",
    decomposed='decompose(outputs.member_logits, "multi_label_classification")',
)

# Of baselines, which this package loads

BASELINE_LIMITS = (
    "- Uncertainty is relative to the data the model was trained and judged on. An unusual input can still get a confident "
    "answer.\n"
    "- Confidence is calibrated only as far as the evaluation shows. For new data, fit a temperature on a validation set.\n"
    "- It always answers with one of its classes, also where none of them fits."
)

BASELINE_ANSWER = """
with torch.no_grad():
    outputs = model(**inputs)
found = decompose(outputs.member_logits)
print(model.config.id2label[found.prediction.item()], f"total {found.total.item():.3f}, epistemic {found.epistemic.item():.3f}")
"""

BASELINE_IMPORTS = """
from hydra_transformers.baselines import Baseline
from hydra_transformers.uncertainty import decompose

model = Baseline.from_pretrained("REPO")"""

# By the Hub's name of the task. A baseline of another kind brings its own.
BASELINE_SNIPPETS = {
    IMAGES.pipeline_tag: f"""
import torch
from PIL import Image
from transformers import AutoImageProcessor
{BASELINE_IMPORTS}
processor = AutoImageProcessor.from_pretrained("REPO")
inputs = processor(images=Image.open("photo.jpg").convert("RGB"), return_tensors="pt"){BASELINE_ANSWER}""",
    TEXTS.pipeline_tag: f"""
import torch
from transformers import AutoTokenizer
{BASELINE_IMPORTS}
tokenizer = AutoTokenizer.from_pretrained("REPO")
inputs = tokenizer("A film that is worth your evening.", return_tensors="pt"){BASELINE_ANSWER}""",
    AUDIO.pipeline_tag: f"""
import numpy as np
import torch
from transformers import AutoFeatureExtractor
{BASELINE_IMPORTS}
extractor = AutoFeatureExtractor.from_pretrained("REPO")
sound = np.zeros(16_000, dtype=np.float32)  # a waveform at the extractor's sampling rate
inputs = extractor(sound, sampling_rate=extractor.sampling_rate, return_tensors="pt"){BASELINE_ANSWER}""",
    ZERO_SHOT.pipeline_tag: f"""{BASELINE_IMPORTS}
""",
}

# By the Auto class that loads a model for it.
TASKS = {
    "AutoModelForAudioClassification": AUDIO,
    "AutoModelForImageClassification": IMAGES,
    "AutoModelForSequenceClassification": TEXTS,
    "AutoModelForZeroShotImageClassification": ZERO_SHOT,
}
