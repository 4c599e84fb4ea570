"""`explain`: where every array of a tree would go, and why."""

from .explain import Explanation as Explanation, Row as Row, explain as explain
