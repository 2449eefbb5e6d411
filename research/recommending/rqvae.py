"""Codes by a residual-quantised autoencoder (Lee et al., CVPR 2022), as TIGER makes them (NeurIPS 2023, 3.1)."""

import numpy as np
import torch
from torch import nn

HIDDEN, LATENT = 128, 32
COMMITMENT = 0.25  # beta
NUM_STEPS, BATCH, LEARNING_RATE = 600, 1024, 1e-3


class ResidualAutoencoder(nn.Module):
    """Autoencoder of vectors (n, dim); each of `books` (num_levels, size, LATENT) quantises what the last one left."""

    def __init__(self, dim: int, num_levels: int, size: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, dim))
        self.books = nn.Parameter(torch.empty(num_levels, size, LATENT))

    @torch.no_grad()
    def begin(self, vectors: torch.Tensor, seed: int) -> None:
        """Initialise the books with latents of the vectors; otherwise most codes would never be used."""
        left, generator = self.encoder(vectors), torch.Generator().manual_seed(seed)
        for book in self.books:
            book.copy_(
                left[torch.randperm(len(left), generator=generator).repeat(-(-len(book) // len(left)))[: len(book)]]
            )
            left = left - book[torch.cdist(left, book).argmin(1)]

    def quantised(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The codes of latents, int64 (n, num_levels), the quantised latents, and the quantisation loss."""
        left, total, codes, loss = latent, torch.zeros_like(latent), [], latent.new_zeros(())
        for book in self.books:
            codes.append(torch.cdist(left.detach(), book.detach()).argmin(1))
            entry = book[codes[-1]]
            loss = loss + (entry - left.detach()).square().mean() + COMMITMENT * (left - entry.detach()).square().mean()
            total, left = total + entry, left - entry.detach()
        return torch.stack(codes, 1), total, loss


def rqvae_codes(vectors: np.ndarray, num_levels: int, size: int, seed: int = 0) -> np.ndarray:
    """Codes, int64 (n, num_levels), below `size`, of vectors float32 (n, dim); equal seeds give equal codes."""
    torch.manual_seed(seed)
    data = torch.from_numpy(vectors)
    data = (data - data.mean(0)) / data.std().clamp_min(1e-6)
    model = ResidualAutoencoder(data.shape[1], num_levels, min(size, len(data)))
    model.begin(data, seed)
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(NUM_STEPS):
        batch = data[torch.randint(len(data), (min(BATCH, len(data)),), generator=generator)]
        latent = model.encoder(batch)
        _, total, loss = model.quantised(latent)
        straight = latent + (total - latent).detach()  # straight-through gradient
        loss = loss + (model.decoder(straight) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return model.quantised(model.encoder(data))[0].numpy()
