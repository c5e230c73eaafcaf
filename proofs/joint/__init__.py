"""All mesh axes planned at once: what planning them one by one, in the best order, is measured against."""

from proofs.joint.optimum import Optimum, joint_optimum
from proofs.joint.problem import JointProblem

__all__ = ["JointProblem", "Optimum", "joint_optimum"]
