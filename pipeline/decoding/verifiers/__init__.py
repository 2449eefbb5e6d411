"""Rules by which drafted tokens are accepted."""

from laserbatch.pipeline.decoding.verifiers.relaxed import Greedy as Greedy
from laserbatch.pipeline.decoding.verifiers.relaxed import Relaxed as Relaxed
from laserbatch.pipeline.decoding.verifiers.relaxed import verifier_from as verifier_from
from laserbatch.pipeline.decoding.verifiers.verifier import DraftedNodes as DraftedNodes
from laserbatch.pipeline.decoding.verifiers.verifier import NodeVerdicts as NodeVerdicts
from laserbatch.pipeline.decoding.verifiers.verifier import Verifier as Verifier
