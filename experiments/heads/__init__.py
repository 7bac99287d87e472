"""Studies of a classifier's heads (sections 3, B.1 to B.3 of the paper): pruning under noise, what heads separate, which heads are
pruned, and how many. Data are lists of batches, dicts of tensors on the model's device."""
