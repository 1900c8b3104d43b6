"""Rules of the options of `whet k8s`, among them those that only the cluster's webhooks would apply."""

from whet.config.rules.ranges import Rule
from whet.kubernetes.rules.action import ACTION_RULES
from whet.kubernetes.rules.amounts import AMOUNT_RULES
from whet.kubernetes.rules.naming import NAMING_RULES
from whet.kubernetes.rules.nodes import NODE_RULES
from whet.kubernetes.rules.variables import VARIABLE_RULES

RULES: tuple[Rule, ...] = (*ACTION_RULES, *NAMING_RULES, *NODE_RULES, *AMOUNT_RULES, *VARIABLE_RULES)
