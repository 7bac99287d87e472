"""Studies of a classifier's heads (sections 3, B.1 to B.3 of the paper); data are lists of batches on the model's device."""
