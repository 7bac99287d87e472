"""The code and sentences of a card that depend on the model's task.

`model_card.md` has those that depend on what is predicted.
"""

from typing import Any

from ..models.task import task_of_config


IMAGES = {
    "pipeline_tag": "image-classification",
    "subject": "Image classification over the classes in `config.id2label`",
    "limit": "It always answers with one of its classes, also where none of them is in the image.",
    "processor_class": "AutoImageProcessor",
    "processor": "processor",
    "imports": "import torch\nfrom PIL import Image",
    "example": '"photo.jpg"',
    "inputs": 'processor(images=Image.open("photo.jpg").convert("RGB"), return_tensors="pt")',
}
TEXTS = {
    "pipeline_tag": "text-classification",
    "subject": "Text classification over the classes in `config.id2label`",
    "limit": "It always answers with one of its classes, also for texts about something else.",
    "processor_class": "AutoTokenizer",
    "processor": "tokenizer",
    "imports": "import torch",
    "example": '"A film that is worth your evening."',
    "inputs": 'tokenizer("A film that is worth your evening.", return_tensors="pt")',
}
TOKENS = TEXTS | {
    "predicts": "tags",
    "pipeline_tag": "token-classification",
    "subject": "Token classification, such as named entities, over the classes in `config.id2label`",
    "limit": "Entities of types that it does not know are not found, or taken for those that it knows.",
    "example": '"Anna Smith went to Paris."',
    "inputs": 'tokenizer("Anna Smith went to Paris.", return_tensors="pt")',
}
AUDIO = {
    "pipeline_tag": "audio-classification",
    "subject": "Audio classification over the classes in `config.id2label`",
    "limit": "It always answers with one of its classes, also where none of them can be heard.",
    "processor_class": "AutoFeatureExtractor",
    "processor": "extractor",
    "imports": "import numpy as np\nimport torch",
    "setup": "audio = np.zeros(16_000, dtype=np.float32)  # a waveform at the extractor's sampling rate",
    "example": "audio",
    "inputs": 'extractor(audio, sampling_rate=extractor.sampling_rate, return_tensors="pt")',
}
ZERO_SHOT = IMAGES | {
    "predicts": "prompts",
    "pipeline_tag": "zero-shot-image-classification",
    "subject": "Zero-shot image classification with class names of your choice",
    "limit": "Predictions and uncertainty depend on the prompts: the classes you name are the only ones it knows of.",
    "processor_class": "AutoProcessor",
    "setup": 'labels = ["cat", "dog", "boat"]\ntemplate = "A photo of a {}."',
    "example": '"photo.jpg", candidate_labels=labels, hypothesis_template=template',
    "padding": "padding=True",
}
# SigLIP says for each pair of an image and a text by itself whether they belong together.
PAIRS = ZERO_SHOT | {
    "predicts": "pairs",
    "limit": "Each text is scored by itself: the probabilities of several need not add up to 1. They, and the "
    "uncertainty, depend on the prompts, which must be padded to full length as in training.",
    "padding": 'padding="max_length", max_length=64',
}
MULTI_LABEL_LIMIT = "Labels it does not know are not noticed, and a label is decided on without regard to others."
REGRESSION_LIMIT = "It always answers with a number, also for inputs that have none."
TASKS = {
    "AutoModelForAudioClassification": AUDIO,
    "AutoModelForImageClassification": IMAGES,
    "AutoModelForSequenceClassification": TEXTS,
    "AutoModelForTokenClassification": TOKENS,
    "AutoModelForZeroShotImageClassification": ZERO_SHOT,
}


def texts_for(model_class: str, config: Any, has_bias: bool) -> dict[str, Any]:
    """Return the entries of a task for the template, as a model's config says.

    has_bias: of two towers, whether each text is scored by itself
    """
    of_class = PAIRS if has_bias else TASKS[model_class]
    texts = {"predicts": "classes", **of_class, "model_class": model_class}
    task = task_of_config(config)
    if task.reads_lists:
        texts["predicts"] = "labels"
        texts["subject"] = texts["subject"].replace("over the classes", "with any number of the labels")
        texts["limit"] = MULTI_LABEL_LIMIT
    if task.predicts_numbers:
        inputs, _, _ = texts["subject"].partition(" ")
        aggregate = getattr(config, "aggregate", None)
        texts["predicts"] = "numbers"
        texts["subject"] = f"Regression from {inputs.lower()}: the numbers in `config.id2label`"
        if aggregate is not None:
            texts["subject"] = f"A score from {inputs.lower()}: rewards and reranking"
        texts["limit"] = REGRESSION_LIMIT
        texts["aggregate"] = aggregate
    return texts
