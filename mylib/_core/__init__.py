"""What may be asked of a tree, and how it is told. Knows no other folder of mylib."""
