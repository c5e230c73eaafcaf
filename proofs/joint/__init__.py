"""Planning of all mesh axes at once: the optimum with which planning one axis after the other is compared."""

from proofs.joint.optimum import Optimum, joint_optimum
from proofs.joint.problem import JointProblem

__all__ = ["JointProblem", "Optimum", "joint_optimum"]
