"""Functions of each value of an array and one number: a scale of embeddings, a soft cap of logits."""
