"""Requests and answers in the protocols of vLLM (classify, score, rerank) and KServe (v1 and v2).

Each protocol turns a request into one of `POST /predict`, so limits and checks are the same, and the answers into its own form.
"""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..hub.handler import Answerer, RequestError


Answers = list[dict[str, Any]]

# The parts of an answer that the forms of other servers have no field for; clients that do not know them leave them alone.
OWN_FIELDS = ("uncertainty", "aleatoric", "epistemic", "abstain", "reason", "prediction_set", "labels", "interval")
# The tensors of KServe v2, with their types; those of a model that was not calibrated for them are left out.
TENSORS = {
    "label": "BYTES",
    "score": "FP64",
    "probabilities": "FP64",
    "uncertainty": "FP64",
    "aleatoric": "FP64",
    "epistemic": "FP64",
    "abstain": "BOOL",
    "prediction_set": "BOOL",
}
TENSORS_OF_NUMBERS = {"values": "FP64", "uncertainty": "FP64", "epistemic": "FP64", "abstain": "BOOL"}
MATRICES = ("probabilities", "values", "prediction_set")  # with a column per class or output


@dataclass(frozen=True)
class Protocol:
    """
    paths: of the requests; {name} is the model's
    read: (request) -> the same as a request to /predict
    write: (answers, request) -> the response
    """

    paths: tuple[str, ...]
    summary: str
    read: Callable[[dict[str, Any]], dict[str, Any]]
    write: Callable[[Answers, dict[str, Any]], dict[str, Any]]


def protocols_of(answerer: Answerer, name: str) -> list[Protocol]:
    """The protocols of a model. name: the model's"""
    forms = Forms.of(answerer, name)
    return [
        Protocol(("/classify",), "vLLM's classification", forms.read_classify, forms.write_classify),
        Protocol(("/score", "/v1/score"), "vLLM's scores of pairs", forms.read_score, forms.write_score),
        Protocol(("/rerank", "/v1/rerank", "/v2/rerank"), "vLLM's ranking", forms.read_rerank, forms.write_rerank),
        Protocol(("/v1/models/{name:path}:predict",), "KServe v1", forms.read_instances, forms.write_predictions),
        Protocol(("/v2/models/{name:path}/infer",), "KServe v2", forms.read_tensors, forms.write_tensors),
    ]


class Forms:
    """The forms of requests and responses for one model.

    class_names: None for a model whose classes come with the request
    gives_numbers: whether the model is made for regression: numbers, not probabilities
    """

    def __init__(self, name: str, class_names: Sequence[str] | None, kind: str, gives_numbers: bool = False):
        self.name, self.kind, self.gives_numbers = name, kind, gives_numbers
        self.class_names = None if class_names is None else list(class_names)
        self.tensors = TENSORS_OF_NUMBERS if gives_numbers else TENSORS

    @classmethod
    def of(cls, answerer: Answerer, name: str) -> "Forms":
        problem_type = getattr(getattr(answerer, "config", None), "problem_type", None)
        return cls(name, getattr(answerer, "class_names", None), answerer.kind, problem_type == "regression")

    # vLLM

    def read_classify(self, data: dict[str, Any]) -> dict[str, Any]:
        if self.gives_numbers:
            raise RequestError(f"{self.name} gives numbers and has no classes: send it to /predict or /score")
        self._check_has_classes()
        return {"inputs": _listed(_field(data, "input")), "parameters": self._every_score()}

    def write_classify(self, answers: Answers, data: dict[str, Any]) -> dict[str, Any]:
        items = [
            {
                "index": place,
                "label": answer["label"],
                "probs": self._probabilities(answer),
                "num_classes": len(answer["scores"]),
                **_own_fields(answer),
            }
            for place, answer in enumerate(answers)
        ]
        return self._list("classify", items)

    def read_score(self, data: dict[str, Any]) -> dict[str, Any]:
        first, second = (_listed(_field(data, name)) for name in ("text_1", "text_2"))
        first = first * len(second) if len(first) == 1 else first
        if len(first) != len(second):
            raise RequestError(
                f"text_1 has {len(first)} texts and text_2 {len(second)}: send equally many, or one in text_1"
            )
        return self._pairs(first, second)

    def write_score(self, answers: Answers, data: dict[str, Any]) -> dict[str, Any]:
        items = [
            {"index": place, "object": "score", "score": self._relevance(answer), **_own_fields(answer)}
            for place, answer in enumerate(answers)
        ]
        return self._list("score", items)

    def read_rerank(self, data: dict[str, Any]) -> dict[str, Any]:
        top_n = data.get("top_n")
        if top_n is not None and (type(top_n) is not int or top_n < 0):
            raise RequestError("top_n must be a whole number, 0 for all")
        documents = _listed(_field(data, "documents"))
        texts = [each.get("text") if isinstance(each, dict) else each for each in documents]
        return self._pairs([_field(data, "query")] * len(texts), texts)

    def write_rerank(self, answers: Answers, data: dict[str, Any]) -> dict[str, Any]:
        results = [
            {
                "index": place,
                "document": document if isinstance(document, dict) else {"text": document},
                "relevance_score": self._relevance(answer),
                **_own_fields(answer),
            }
            for place, (document, answer) in enumerate(zip(_listed(data["documents"]), answers, strict=True))
        ]
        # An answer that is no number comes last.
        results.sort(key=lambda each: (each["relevance_score"] is None, -(each["relevance_score"] or 0)))
        found = {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": self.name,
            "usage": {"prompt_tokens": 0, "total_tokens": 0},
        }
        return found | {"results": results[: data.get("top_n") or len(results)]}

    def _pairs(self, first: list[Any], second: list[Any]) -> dict[str, Any]:
        if self.kind != "text" or self.class_names is None or len(self.class_names) > (1 if self.gives_numbers else 2):
            raise RequestError(
                f"{self.name} gives no score to a pair of texts: that takes a model of texts with one output or two classes"
            )
        pairs = [{"text": one, "text_pair": other} for one, other in zip(first, second, strict=True)]
        return {"inputs": pairs, "parameters": self._every_score()}

    def _relevance(self, answer: dict[str, Any]) -> float | None:
        """The only output, or the probability of the second of two classes."""
        return self._probabilities(answer)[-1]

    def _list(self, kind: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        # Tokens are not counted here; clients expect the field.
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0, "prompt_tokens_details": None}
        found = {"id": f"{kind}-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": self.name}
        return found | {"data": items, "usage": usage}

    # KServe v1

    def read_instances(self, data: dict[str, Any]) -> dict[str, Any]:
        instances = _field(data, "instances")
        if not isinstance(instances, list):
            raise RequestError("instances must be a list")
        inputs = [each["b64"] if isinstance(each, dict) and each.keys() == {"b64"} else each for each in instances]
        return {"inputs": inputs, "parameters": data.get("parameters")}

    def write_predictions(self, answers: Answers, data: dict[str, Any]) -> dict[str, Any]:
        return {"predictions": answers}

    # KServe v2

    def read_tensors(self, data: dict[str, Any]) -> dict[str, Any]:
        self._check_has_classes()
        tensors = _field(data, "inputs")
        is_list = isinstance(tensors, list) and tensors and all(isinstance(each, dict) for each in tensors)
        if not is_list or not all(isinstance(each.get("name"), str) for each in tensors):
            raise RequestError("inputs must be a list of tensors, {name, shape, datatype, data}")
        columns = {each.get("name"): _strings(each) for each in tensors}
        if len(columns) == 2 and columns.keys() == {"text", "text_pair"}:
            first, second = columns["text"], columns["text_pair"]
            if len(first) != len(second):
                raise RequestError("the tensors text and text_pair must have the same shape")
            inputs: list[Any] = [{"text": one, "text_pair": other} for one, other in zip(first, second, strict=True)]
        elif len(tensors) == 1:
            [inputs] = columns.values()
        else:
            raise RequestError("inputs has several tensors: send one, or text and text_pair")
        for name in self._asked_tensors(data):
            if not isinstance(name, str) or name not in self.tensors:
                raise RequestError(
                    f"outputs has an unknown {str(name)[:40]!r}: this model has {', '.join(self.tensors)}"
                )
        given = data.get("parameters") or {}
        if not isinstance(given, dict):
            raise RequestError("parameters must be an object")
        parameters = {name: given[name] for name in ("candidate_labels", "hypothesis_template") if name in given}
        return {"inputs": inputs, "parameters": self._every_score(parameters.get("candidate_labels")) | parameters}

    def write_tensors(self, answers: Answers, data: dict[str, Any]) -> dict[str, Any]:
        names = self.class_names or data["parameters"]["candidate_labels"]
        columns: dict[str, list[Any]] = {name: [answer.get(name) for answer in answers] for name in self.tensors}
        matrix = "values" if self.gives_numbers else "probabilities"
        columns[matrix] = [self._probabilities(answer, names) for answer in answers]
        if "prediction_set" in columns:
            columns["prediction_set"] = [
                None if chosen is None else [name in chosen for name in names] for chosen in columns["prediction_set"]
            ]
        outputs = []
        for name in self._asked_tensors(data) or self.tensors:
            column = columns[name]
            if self.tensors[name] == "BOOL" and None in column:  # not calibrated for it
                continue
            is_matrix = name in MATRICES
            shape = [len(column), len(names)] if is_matrix else [len(column)]
            flat = [value for row in column for value in row] if is_matrix else column
            outputs.append({"name": name, "shape": shape, "datatype": self.tensors[name], "data": flat})
        found = {"model_name": self.name, "model_version": "1", "outputs": outputs}
        return found | ({"id": data["id"]} if isinstance(data.get("id"), str) else {})

    def metadata(self) -> dict[str, Any]:
        """Of KServe v2: names, types and shapes of the tensors."""
        classes = -1 if self.class_names is None else len(self.class_names)
        outputs = [
            {"name": name, "datatype": kind, "shape": [-1, classes] if name in MATRICES else [-1]}
            for name, kind in self.tensors.items()
        ]
        read = {"name": self.kind if self.kind in ("text", "audio") else "image", "datatype": "BYTES", "shape": [-1]}
        found = {"name": self.name, "versions": ["1"], "platform": "hydra_transformers"}
        return found | {"inputs": [read], "outputs": outputs}

    def _asked_tensors(self, data: dict[str, Any]) -> list[Any]:
        asked = data.get("outputs") or []
        if not isinstance(asked, list) or not all(isinstance(each, dict) for each in asked):
            raise RequestError("outputs must be a list of objects with a name")
        return [each.get("name") for each in asked]

    # Both

    def _check_has_classes(self) -> None:
        if self.kind == "tokens":
            raise RequestError(f"{self.name} finds entities, for which there is no field here: send it to /predict")

    def _every_score(self, labels: Any = None) -> dict[str, Any]:
        names = self.class_names if labels is None else labels
        if names is None:
            raise RequestError(f"{self.name} chooses among the candidate_labels of a request: send it to /predict")
        if not isinstance(names, list):
            raise RequestError("candidate_labels must be a list of texts")
        if len(set(map(str, names))) < len(names):
            raise RequestError(
                f"classes of {self.name} share a name, and cannot be told apart here: send it to /predict"
            )
        return {"top_k": max(len(names), 1)}

    def _probabilities(self, answer: dict[str, Any], names: Sequence[str] | None = None) -> list[float | None]:
        """In the order of the classes."""
        scores = {each["label"]: each["score"] for each in answer["scores"]}
        return [scores[name] for name in names or self.class_names]


def _field(data: dict[str, Any], name: str) -> Any:
    if name not in data:
        raise RequestError(f"the request has no {name}")
    return data[name]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _own_fields(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: answer[name] for name in OWN_FIELDS if name in answer}


def _strings(tensor: dict[str, Any]) -> list[str]:
    """The texts, or images or WAV files in base64, of a tensor of one axis, or of two of which the second has length 1."""
    name, data, shape = tensor.get("name"), tensor.get("data"), tensor.get("shape")
    if tensor.get("datatype") != "BYTES":
        raise RequestError(f"the tensor {str(name)[:40]!r} must be BYTES: texts, or images or WAV files in base64")
    if not isinstance(data, list) or not isinstance(shape, list):
        raise RequestError(
            f"the tensor {str(name)[:40]!r} needs shape and data as lists: binary data is not read, send JSON"
        )
    if data and all(isinstance(each, list) and len(each) == 1 for each in data):
        data = [each[0] for each in data]
    if shape not in ([len(data)], [len(data), 1]):
        raise RequestError(
            f"the tensor {str(name)[:40]!r} has {len(data)} entries, and another shape: send [{len(data)}]"
        )
    return data
