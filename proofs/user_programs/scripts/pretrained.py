"""A model of transformers: trained, saved and loaded again."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import spmd
from spmd import P

mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=4,
    max_position_embeddings=16,
)
model = LlamaForCausalLM(config).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loss_fn = spmd.jit(lambda model, ids: model(input_ids=ids, labels=ids).loss, (P(), P("data")), P(), mesh=mesh)
results = []
for _ in range(4):
    optimizer.zero_grad()
    loss = loss_fn(model, torch.randint(32, (4, 8)))
    loss.backward()
    optimizer.step()
    results.append(loss.detach())
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    loaded = LlamaForCausalLM.from_pretrained(folder).double()
results += [p.detach() for p in loaded.parameters()]
