"""A state as flax has it: a dataclass with a step, parameters, and a method that applies gradients."""

import dataclasses

import torch

import spmd

mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
torch.manual_seed(0)


@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a step takes and returns."""

    step: torch.Tensor
    params: dict
    opt_state: dict

    def apply_gradients(self, grads):
        """The state after one step."""
        velocity = {name: 0.9 * old + grads[name] for name, old in self.opt_state.items()}
        params = {name: old - 0.05 * velocity[name] for name, old in self.params.items()}
        return dataclasses.replace(self, step=self.step + 1, params=params, opt_state=velocity)


def apply_fn(params, x):
    return torch.relu(x @ params["w1"]) @ params["w2"]


@spmd.jit(mesh=mesh)
def train_step(state, batch):
    def loss_fn(params):
        return (apply_fn(params, batch["x"]) - batch["y"]).square().mean()

    grads, loss = torch.func.grad_and_value(loss_fn)(state.params)
    return state.apply_gradients(grads), {"loss": loss}


params = {"w1": torch.randn(4, 8), "w2": torch.randn(8, 2)}
state = TrainState(torch.tensor(0), params, {name: torch.zeros_like(value) for name, value in params.items()})
results = []
for number in range(20):
    state, metrics = train_step(state, {"x": torch.randn(10, 4), "y": torch.randn(10, 2)})
    step, params, opt_state, loss = state.step, state.params, state.opt_state, metrics["loss"]
    results += [step, loss]
