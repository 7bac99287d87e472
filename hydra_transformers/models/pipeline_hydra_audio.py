"""The audio classification pipeline with uncertainty."""

from typing import Any

from transformers.pipelines import AudioClassificationPipeline

from .pipeline_hydra import PredictionsMixin


def check_is_whole(content: bytes) -> None:
    """Raise for a WAV file that is cut off, of which decoders would return the part that is
    there."""
    place = 12
    while content[:4] == b"RIFF" and place + 8 <= len(content):
        name = content[place : place + 4]
        size = int.from_bytes(content[place + 4 : place + 8], "little")
        place += 8 + size + size % 2
        if name == b"data" and place - size % 2 > len(content):
            raise ValueError("the WAV file is cut off, its header says that it has more samples: save it again")


class HydraAudioClassificationPipeline(PredictionsMixin, AudioClassificationPipeline):
    def preprocess(self, inputs: Any) -> Any:
        if isinstance(inputs, str) and not inputs.startswith(("http://", "https://")):
            with open(inputs, "rb") as file:
                inputs = file.read()
        if isinstance(inputs, bytes):
            check_is_whole(inputs)
        return super().preprocess(inputs)
