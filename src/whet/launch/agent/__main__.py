"""`python -m whet.launch.agent`: what ssh starts on a host."""

import sys

from whet.launch.agent.serve import main

if __name__ == "__main__":
    sys.exit(main())
