"""From recorded facts to findings and advice. Nothing here imports torch."""
