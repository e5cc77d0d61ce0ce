"""Members: adapters that share a bank, and the same ones alone, each on a model of its own."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tiny_decoders import summed_loss, tiny_decoder, train_as_if_
from xorl.core.models import Decoder
from xorl.lora import Adam, AdapterBank, AdapterSpec, adapter_parameters, inject


@dataclass(frozen=True)
class Members:
    """sizes: the model's configuration. specs: by name. lengths: of each one's document. options: of the bank."""

    sizes: Mapping[str, object]
    specs: Mapping[str, AdapterSpec]
    lengths: Sequence[int]
    options: Mapping[str, object]

    def index(self, name: str) -> int:
        return list(self.specs).index(name)

    def decoder(self) -> Decoder:
        return tiny_decoder(self.sizes)

    def bank_over(self, model: nn.Module, **options) -> AdapterBank:
        return AdapterBank(model, **{**self.options, "device": "cpu", **options})

    def fill(self, bank: AdapterBank, names: Collection[str] | None = None) -> None:
        """Adds these, or all, with values as if they were trained."""
        for name in self.specs if names is None else names:
            bank.add(name, self.specs[name], seed=self.index(name))
            held = bank.snapshot(name)
            tensors = held.tensors()
            train_as_if_(values := {key: tensors[key].clone() for key, _ in held.names}, self.index(name))
            bank.restore(name, type(held).of_tensors(held.spec, held.names, tensors | values))

    def alone(self, name: str) -> tuple[Decoder, dict[str, nn.Parameter]]:
        """A model with this one, injected, and its parameters."""
        model = self.decoder()
        inject(model, self.specs[name], seed=self.index(name))
        parameters = adapter_parameters(model)
        train_as_if_(parameters, self.index(name))
        return model, parameters

    def run(self, model: Decoder, *names: str) -> Tensor:
        """The loss of their documents."""
        lengths = [self.lengths[self.index(name)] for name in names]
        generators = [torch.Generator().manual_seed(self.index(name)) for name in names]
        made = zip(lengths, generators, strict=True)
        ids = torch.cat([torch.randint(37, (length,), generator=generator) for length, generator in made])
        return summed_loss(model, ids, lengths)

    def run_mixed(self, bank: AdapterBank, model: Decoder, names: Sequence[str]) -> Tensor:
        """The same through the bank, where each document is its own adapter's."""
        bank.activate([(name, self.lengths[self.index(name)]) for name in names])
        return self.run(model, *names)

    def check_gradients(self, bank: AdapterBank, name: str, times: float = 1.0) -> tuple[Decoder, Tensor]:
        """Compares the gradients in the bank with those of a run alone, and returns its model and loss."""
        own, parameters = self.alone(name)
        loss = self.run(own, name)
        (loss * times).backward()
        gradients = bank.gradients(name)
        assert gradients.keys() == parameters.keys()
        for key, parameter in parameters.items():
            assert parameter.grad is not None
            assert (gradients[key] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), (name, key)
        return own, loss

    def adams(self) -> dict[str, Adam]:
        """Of each another one. With the usual eps, a gradient of rounding alone would move a weight like any other."""
        return {
            name: Adam(1e-2 / (1 + index), eps=1e-3, weight_decay=0.1 * index) for index, name in enumerate(self.specs)
        }

    def trained_alone(self, name: str, num_steps: int) -> dict[str, nn.Parameter]:
        """The parameters after steps by torch's AdamW: two passes each, divided by 3, then clipped to a norm of 1."""
        own, parameters = self.alone(name)
        adam = self.adams()[name]
        optimizer = torch.optim.AdamW(parameters.values(), lr=adam.lr, eps=adam.eps, weight_decay=adam.weight_decay)
        for _ in range(num_steps):
            for _ in range(2):
                self.run(own, name).backward()
            for parameter in parameters.values():
                parameter.grad /= 3.0
            nn.utils.clip_grad_norm_(parameters.values(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return parameters
