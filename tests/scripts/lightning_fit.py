"""A Lightning script: the Trainer starts the second rank itself, as a subprocess of the same command line."""

import logging
import warnings

import lightning
import torch
from torch import nn

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.set_num_threads(1)


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        self.projector = nn.Linear(8, 2)

    def training_step(self, batch, index):
        inputs, targets = batch
        return nn.functional.cross_entropy(self.body(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.arange(32) % 3)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp_find_unused_parameters_true",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), torch.utils.data.DataLoader(data, batch_size=4))
