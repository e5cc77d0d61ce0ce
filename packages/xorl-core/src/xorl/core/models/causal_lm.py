"""CausalLM: a model of any family as a plain module over rows of token ids, for training loops that know no layouts.

B rows, S positions, V vocabulary.
"""

import torch
from torch import Tensor, nn

from xorl.core.models.decoder import Decoder
from xorl.kernels.layout import SequenceLayout


class CausalLM(nn.Module):
    """Maps token ids [B, S] to logits [B, S, V]; each row is one document.

    Under `torch.autocast`, the layers compute in its dtype, with norms and attention scores in fp32 as everywhere in
    xorl; otherwise in fp32. Parameters are stored in fp32. Padding belongs at the end of a row, where causal attention
    never reads it.

    Attributes:
        decoder: the model; `decoder.layers` are the units to shard.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [B, S, V] of input_ids [B, S], in the dtype of the computation."""
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids must have shape [B, S], got {[*input_ids.shape]}; add a dim for the row")
        rows, length = input_ids.shape
        device_type = input_ids.device.type
        is_autocast = torch.is_autocast_enabled(device_type)
        self.decoder.compute_dtype = torch.get_autocast_dtype(device_type) if is_autocast else torch.float32
        layout = SequenceLayout.from_lengths([length] * rows, input_ids.device)
        # The layers cast themselves, which autocast would do a second time and differently.
        with torch.autocast(device_type, enabled=False):
            logits = self.decoder(input_ids.flatten(), layout)
        return logits.unflatten(0, (rows, length))
