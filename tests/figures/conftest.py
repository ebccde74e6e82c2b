import sys
from pathlib import Path

# pairs of trajectories with known residuals are shared with the tests of `compare`
sys.path.insert(0, str(Path(__file__).parents[1] / "compare"))
