"""`python -m mylib.testing launch -n 4 script.py`"""

import sys

from ._launch import main

if __name__ == "__main__":
    if sys.argv[1:2] != ["launch"]:
        sys.exit("usage: python -m mylib.testing launch -n N [--devices-per-process K] script.py")
    sys.exit(main(sys.argv[2:]))
