"""What every fused encoder does between its embeddings and what is read from it."""

from collections.abc import Collection

import torch
from torch import nn

from .attention import has_rows
from .ensembling import HydraModelOutput, batch_first, mean_of_members
from .fast_inference import run_layers
from .grouped import PerMember


class HydraEncoderMixin:
    """The way through an encoder: `start`, its layers, `finish`.

    A family's encoder has `embeddings` and `layers`, and says how it starts and ends:

    - `start(**inputs)` gives the states that enter the first layer, (members or 1, batch, tokens, hidden), the mask
      that its attention reads, and what else layers are to be given;
    - `finish(states, **inputs)` gives the states that it shows, (members, batch, tokens, hidden), and what it pools from
      them, (members, batch, pooled) or None. It names the inputs that it needs again.
    """

    is_base_model = True
    one_token_stands_for_all = (
        True  # of an image, text or sound: the first, or of a text that is read in one direction the last
    )

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

        Each layer reads the very tensor that is shown (a trunk's the first member's part), which gradients can be asked of.
        """
        shown, members = [], self.num_members
        for index, layer in enumerate(self.layers):
            if index == 0 and wanted is True:
                shown.append(batch_first(states, members))
                states = shown[0].transpose(0, 1)
            states = batch_first(layer(states[: self.config.members_in(index)], mask, **kwargs), members)
            shown.append(states if wanted is True or index in wanted else None)
            states = states.transpose(0, 1)
        return states, tuple(shown)

    def first_embeddings(self) -> nn.Module:
        """The embeddings; those of the first member where members do not share them."""
        return self.embeddings[0] if isinstance(self.embeddings, PerMember) else self.embeddings
