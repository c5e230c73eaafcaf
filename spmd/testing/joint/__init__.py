"""All mesh axes planned at once: what planning them one by one, in the best order, is measured against."""

from spmd.testing.joint.optimum import Optimum, joint_optimum
from spmd.testing.joint.problem import JointProblem

__all__ = ["JointProblem", "Optimum", "joint_optimum"]
