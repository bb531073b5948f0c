"""Reading data: texts, treebanks, word alignments, training logs; and sentences as batches."""
