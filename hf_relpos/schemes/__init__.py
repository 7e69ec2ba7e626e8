"""Position schemes, one file each. A new one needs a file with a subclass of `Scheme`, and an import here.

To write one elsewhere: `Scheme`, `Option`, `Terms`, `Table`, `AttentionContext`, `attend`; `SCHEMES` lists all.
"""

from ..attention.context import AttentionContext as AttentionContext
from ..attention.formula import Table as Table, Terms as Terms, attend as attend
from .absolute import Absolute as Absolute
from .alibi import ALiBi as ALiBi
from .cable import Cable as Cable
from .cape import Cape as Cape
from .deberta import Deberta as Deberta
from .disan import DiSAN as DiSAN
from .dual_triangle import DualTriangle as DualTriangle
from .fire import Fire as Fire
from .grape_m import GrapeM as GrapeM
from .harmonic import Harmonic as Harmonic
from .hop import Hop as Hop
from .huang import HuangM1 as HuangM1, HuangM2 as HuangM2, HuangM3 as HuangM3
from .kerple import Kerple as Kerple
from .log_cpb import LogCPB as LogCPB
from .music import Music as Music
from .nezha import Nezha as Nezha
from .pope import PoPE as PoPE
from .projection_cache import project as project
from .registry import SCHEMES as SCHEMES, position_bias as position_bias
from .relation import Relation as Relation
from .relative_2d import Relative2d as Relative2d
from .relative_key import RelativeKey as RelativeKey, RelativeKeyQuery as RelativeKeyQuery
from .rope import RoPE as RoPE
from .sandwich import Sandwich as Sandwich
from .scheme import Option as Option, Scheme as Scheme
from .shaw import Shaw as Shaw
from .sinusoidal import Sinusoidal as Sinusoidal
from .sinusoidal_2d import Sinusoidal2d as Sinusoidal2d
from .t5 import T5 as T5
from .tables import Tables as Tables
from .tener import Tener as Tener
from .transformer_xl import TransformerXL as TransformerXL
from .tupe import Tupe as Tupe
from .xlnet import XLNet as XLNet
