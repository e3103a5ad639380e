"""A script around the Trainer of transformers, whose model keeps a pooler that no loss uses."""

import sys

import torch
from torch import nn
from transformers import BertConfig, BertModel, Trainer, TrainingArguments

torch.set_num_threads(1)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        self.bert = BertModel(BertConfig(vocab_size=32, max_position_embeddings=16, **sizes))
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids, labels):
        logits = self.head(self.bert(input_ids).last_hidden_state)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        tokens = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens % 3}


trainer = Trainer(
    model=Tagger(),
    args=TrainingArguments(
        output_dir="trained",
        per_device_train_batch_size=2,
        num_train_epochs=1,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=len(sys.argv) > 1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=Sentences(),
)
trainer.train()
