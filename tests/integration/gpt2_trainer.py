"""A training script as people write it: GPT-2 in a tiny configuration, the Trainer of transformers, two ranks."""

import sys
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ddpcov

torch.set_num_threads(1)


class Sequences(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        tokens = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    num_train_epochs=1,
    use_cpu=True,
    ddp_backend="gloo",
    ddp_find_unused_parameters=False,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=Sequences())
with ddpcov.track(model, out=f"{sys.argv[1]}/run.bin"):
    trainer.train()
del trainer, model
torch.distributed.destroy_process_group()
time.sleep(0.3)  # gloo's worker threads drop their last work here; at interpreter exit that aborts the process
