"""The updates of one rollout in PyTorch: log-probabilities by transformers' model, the loss from the formulas, clipped
gradients, torch's AdamW.
"""

from typing import Any

import numpy as np
import torch

from oracles import torch_grpo
from qerl_jax.config import Config
from qerl_jax.types import Batch


class TorchUpdates:
    """Updates of some parameters of a model; a subclass makes them.

    Attributes:
      config: settings of the run.
      base: the model of the reference's log-probabilities.
      model: the model that is trained.
      parameters: what is trained, by a name of the subclass's.
      optimizer: AdamW over the parameters.
    """

    config: Config
    base: torch.nn.Module
    model: torch.nn.Module
    parameters: dict[Any, torch.Tensor]
    optimizer: torch.optim.Optimizer

    def logprobs(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Log-probabilities of the tokens behind the first, under top-k with that of the token itself kept."""
        tokens = torch.tensor(np.asarray(batch.tokens)).long()
        mask = torch.tensor(np.asarray(batch.attention_mask)).long()
        logits = model(input_ids=tokens, attention_mask=mask).logits[:, :-1]
        if self.config.top_k:
            least = logits.topk(self.config.top_k).values[..., -1:]
            is_target = torch.nn.functional.one_hot(tokens[:, 1:], logits.shape[-1]).bool()
            logits = logits.masked_fill((logits < least) & ~is_target, -torch.inf)
        logits = logits / self.config.temperature
        return torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])[..., 0]

    def step(self, batch: Batch) -> tuple[list[float], list[float]]:
        """`num_iterations` updates; the losses, and the norms of the gradients before they are clipped."""
        mask = torch.tensor(np.asarray(batch.loss_mask))[:, 1:]
        behaviour = torch.tensor(np.asarray(batch.logprobs)).double()[:, 1:]
        advantages = torch.tensor(np.asarray(batch.advantages)).double()
        with torch.no_grad():
            reference = self.logprobs(self.base, batch)
        old, losses, norms = None, [], []
        for _ in range(self.config.num_iterations):
            logp = self.logprobs(self.model, batch)
            old = logp.detach() if old is None else old
            loss = torch_grpo.loss(logp, old, behaviour, reference, advantages, mask, self.config)
            self.optimizer.zero_grad()
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.config.max_grad_norm).item())
            self.optimizer.step()
            losses.append(loss.item())
        return losses, norms
