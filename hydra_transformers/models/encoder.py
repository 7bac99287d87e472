"""What every fused encoder does between its embeddings and what is read from it."""

from collections.abc import Collection

import torch
from torch import nn
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention import encoder_mask, has_rows
from .ensembling import HydraModelOutput, batch_first, mean_of_members
from .fast_inference import run_layers
from .grouped import PerMember, embed


class HydraEncoderMixin:
    """The way through an encoder: `start`, its layers, `finish`.

    A family's encoder has `embeddings` and `layers`, and says how it starts and ends:

    - `start(**inputs)` gives the states that enter the first layer, (members or 1, batch, tokens, hidden), the mask
      that its attention reads, and what else layers are to be given;
    - `finish(states, **inputs)` gives the states that it shows, (members, batch, tokens, hidden), and what it pools from
      them, (members, batch, pooled) or None. It names the inputs that it needs again.
    """

    is_base_model = True

    def start(self, **inputs) -> tuple[torch.Tensor, torch.Tensor | None, dict]:
        raise NotImplementedError

    def finish(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        raise NotImplementedError

    def encode(
        self,
        states: torch.Tensor,
        mask: torch.Tensor | None,
        first_token_only: bool = False,
        members_only: bool = False,
        output_hidden_states: bool | Collection[int] | None = None,
        finish_with: dict | None = None,
        **kwargs,
    ) -> HydraModelOutput:
        """From the first layer to the outputs.

        first_token_only: let the last layer compute the first token alone, where that is all that will be read; states
            then have one token
        members_only: leave out the means over members, which a head does not read
        finish_with: the inputs that `finish` needs again
        """
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        shown = None
        if wanted is False or wanted is None:
            states = run_layers(self.layers, states, mask, first_token_only and has_rows(mask), **kwargs)
        else:
            states, shown = self._run_and_show(states, mask, wanted, **kwargs)
        states, pooled = self.finish(states, **(finish_with or {}))
        return HydraModelOutput(
            last_hidden_state=None if members_only else mean_of_members(states),
            pooler_output=None if members_only or pooled is None else mean_of_members(pooled),
            member_last_hidden_state=batch_first(states, self.num_members),
            member_pooler_output=None if pooled is None else batch_first(pooled, self.num_members),
            hidden_states=shown,
        )

    def _run_and_show(self, states, mask, wanted: bool | Collection[int], **kwargs):
        """The layers one by one, with the states between them as (batch, members, tokens, hidden).

        Each layer reads the very tensor that is shown, so that gradients can be asked of it.
        """
        shown, members = [], self.num_members
        for index, layer in enumerate(self.layers):
            if index == 0 and wanted is True:
                shown.append(batch_first(states, members))
                states = shown[0].transpose(0, 1)
            states = batch_first(layer(states, mask, **kwargs), members)
            shown.append(states if wanted is True or index in wanted else None)
            states = states.transpose(0, 1)
        return states, tuple(shown)

    def encoder_mask(self, states: torch.Tensor, attention_mask) -> torch.Tensor | None:
        return encoder_mask(self.config, states, attention_mask, self.num_members)

    def first_embeddings(self) -> torch.nn.Module:
        """The embeddings; those of the first member where members do not share them."""
        return self.embeddings[0] if isinstance(self.embeddings, PerMember) else self.embeddings


class HydraImageEncoderMixin(HydraEncoderMixin):
    """An encoder of images: embeddings of patches."""

    def get_input_embeddings(self) -> nn.Module:
        """The patch embeddings; those of the first member where members do not share them."""
        return self.first_embeddings().patch_embeddings

    def start(
        self, pixel_values: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None, **for_embeddings
    ):
        if pixel_values is None:
            raise ValueError("pixel_values is missing: pass the image processor's output")
        dtype = self.get_input_embeddings().projection.weight.dtype
        states = embed(self.embeddings, pixel_values.to(dtype), **for_embeddings)
        return states, self.encoder_mask(states, attention_mask), {}

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: torch.Tensor | None = None,
        first_token_only: bool = False,
        members_only: bool = False,
        **kwargs,
    ) -> HydraModelOutput:
        """
        pixel_values: (batch, channels, height, width)
        first_token_only, members_only: compute no more than a classifier reads, see `encode`
        """
        if kwargs.pop("bool_masked_pos", None) is not None:
            raise ValueError("bool_masked_pos is for masked image modelling, which a Hydra does not do: leave it out")
        for_embeddings = (
            {} if interpolate_pos_encoding is None else {"interpolate_pos_encoding": interpolate_pos_encoding}
        )
        states, mask, for_layers = self.start(pixel_values, attention_mask, **for_embeddings)
        return self.encode(states, mask, first_token_only, members_only, **for_layers, **kwargs)


class HydraTextEncoderMixin(HydraEncoderMixin):
    """An encoder of texts: embeddings of words and their positions."""

    def get_input_embeddings(self) -> nn.Module:
        """The word embeddings; those of the first member where members do not share them."""
        return self.first_embeddings().word_embeddings

    def set_input_embeddings(self, value: nn.Module):
        if isinstance(self.embeddings, PerMember):
            raise ValueError("each member has word embeddings of its own: change them in the members, then fuse these")
        self.embeddings.word_embeddings = value

    def start(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **for_embeddings,
    ):
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass input_ids or inputs_embeds, and not both")
        states = embed(self.embeddings, input_ids=input_ids, inputs_embeds=inputs_embeds, **for_embeddings)
        return states, self.encoder_mask(states, attention_mask), {}

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        first_token_only: bool = False,
        members_only: bool = False,
        **kwargs,
    ) -> HydraModelOutput:
        """
        input_ids, attention_mask, token_type_ids, position_ids: (batch, tokens)
        inputs_embeds: (batch, tokens, hidden), in place of input_ids
        first_token_only, members_only: compute no more than a classifier reads, see `encode`
        """
        for_embeddings = {"position_ids": position_ids, "token_type_ids": token_type_ids}
        states, mask, for_layers = self.start(input_ids, attention_mask, inputs_embeds, **for_embeddings)
        return self.encode(states, mask, first_token_only, members_only, **for_layers, **kwargs)
