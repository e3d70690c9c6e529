"""Probes fitted the plain way: one map at a time, with torch's own layers, losses and Adam; ridge by least squares."""

import numpy as np
import torch
from torch import nn


def build(parameters):
    """Make torch's own modules out of a start: a linear layer without bias, or an MLP with the exact GELU."""
    mlp = [("weight_in", "bias_in"), ("weight_out", "bias_out")]
    layers = [("weight", None)] if "weight" in parameters else mlp
    modules = []
    for weight, bias in layers:
        linear = nn.Linear(*parameters[weight].shape, bias=bias is not None, dtype=parameters[weight].dtype)
        linear.weight.data = parameters[weight].T.clone()
        if bias:
            linear.bias.data = parameters[bias][0].clone()
        modules += [linear, nn.GELU()]
    return nn.Sequential(*modules[:-1])


def loss(predicted, target, distance):
    if distance == "cosine":
        return (1 - nn.functional.cosine_similarity(predicted, target)).mean()
    return (predicted - target).norm(dim=1).mean()


def train(model, batches_of_epoch, validation, *, distance, learning_rate, patience, epochs):
    """Train with Adam and early stopping; return the best validation loss, its epoch, and leave the best parameters."""
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, betas=(0.9, 0.999))
    best, best_epoch, kept = float("inf"), 0, None
    for epoch in range(epochs):
        for features, targets in batches_of_epoch(epoch):
            optimizer.zero_grad()
            loss(model(features), targets, distance).backward()
            optimizer.step()
        with torch.no_grad():
            value = float(loss(model(validation[0]), validation[1], distance))
        if value < best:
            best, best_epoch = value, epoch + 1
            kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if epoch + 1 - best_epoch >= patience:
            break
    model.load_state_dict(kept)
    return best, best_epoch


def ridge(features, targets, strength):
    """Least squares on the system with √strength·I appended to the features and zeros to the targets."""
    width = features.shape[1]
    augmented = np.concatenate([features, np.sqrt(strength) * np.eye(width)])
    padded = np.concatenate([targets, np.zeros((width, targets.shape[1]))])
    return np.linalg.lstsq(augmented, padded, rcond=None)[0]
