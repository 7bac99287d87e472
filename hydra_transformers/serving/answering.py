"""Any model that `predict_decisions` takes, behind the requests of the server."""

from typing import Any

from ..hub.handler import Answerer
from ..uncertainty import predict_decisions


class ModelAnswerer(Answerer):
    """A Hydra, any classifier or CLIP of Transformers, a baseline, or what `calibrate` made of one."""

    def answer(self, inputs: list[Any], parameters: dict[str, Any]) -> list[dict[str, Any]]:
        return predict_decisions(self.model, inputs, self.processor, len(inputs), **parameters)
