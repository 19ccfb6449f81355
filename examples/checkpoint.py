"""Save and resume with torch.distributed.checkpoint, on any mesh: a checkpoint knows nothing of ranks."""

from __future__ import annotations

from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as write
from torch.optim import Optimizer


def save(folder: str, model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Write the weights, the optimizer's state and the number of the next step. Collective."""
    weights, moments = get_state_dict(model, optimizer)
    write({"model": weights, "optimizer": moments, "step": step}, checkpoint_id=folder)


def resume(folder: str, model: nn.Module, optimizer: Optimizer) -> int:
    """Read what ``save`` wrote into a model of the same sizes; return the next step. Collective."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"]
