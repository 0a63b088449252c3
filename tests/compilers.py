"""What `torch.compile` can do on this machine: its code generator needs a C++ compiler."""

import os
import shutil

HAS_COMPILER = shutil.which(os.environ.get("CXX", "g++").split()[0]) is not None
# Without a compiler, everything but the generation of code is tested.
BACKEND = "inductor" if HAS_COMPILER else "aot_eager"
