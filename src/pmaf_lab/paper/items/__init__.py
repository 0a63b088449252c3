"""The paper's experiments, each runnable alone by its name."""

from pmaf_lab.experiments import Collection
from pmaf_lab.paper.items.case_study import CaseStudy, Samples
from pmaf_lab.paper.items.gradient_error import GradientError
from pmaf_lab.paper.items.ied_cost import EigenCost
from pmaf_lab.paper.items.ied_precision import EigenPrecision
from pmaf_lab.paper.items.ied_resnet import EigenResNet
from pmaf_lab.paper.items.less_backward import LessBackward
from pmaf_lab.paper.items.less_table import LessTable

_LEAD = (
    "The experiments of “PMaF: Deep Declarative Layers for Principal Matrix Features” (Xu, Wang, "
    "Liu and Gould, 2023), with the figures the paper prints beside those measured here. "
)

REPRODUCTION = Collection(
    command="reproduce",
    title="The paper’s experiments, run again",
    lead={
        "quick": _LEAD + "This is a quick run: each section says what it leaves out.",
        "full": _LEAD + "This is a full run: all sizes that fit the machine; the sections say "
        "how many seeds.",
    },
    source="paper",
    extra="paper",
    experiments=(
        CaseStudy(),
        Samples(),
        LessTable(),
        LessBackward(),
        EigenPrecision(),
        EigenResNet(),
        EigenCost(),
        GradientError(),
    ),
)
