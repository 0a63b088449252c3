"""The paper's experiments, each runnable alone by its name."""

from pmaf.experiments import Experiment
from pmaf.paper.items.case_study import CaseStudy, Samples
from pmaf.paper.items.gradient_error import GradientError
from pmaf.paper.items.ied_cost import EigenCost
from pmaf.paper.items.ied_precision import EigenPrecision
from pmaf.paper.items.ied_resnet import EigenResNet
from pmaf.paper.items.less_backward import LessBackward
from pmaf.paper.items.less_table import LessTable

ITEMS: dict[str, Experiment] = {
    item.name: item
    for item in (
        CaseStudy(),
        Samples(),
        LessTable(),
        LessBackward(),
        EigenPrecision(),
        EigenResNet(),
        EigenCost(),
        GradientError(),
    )
}
