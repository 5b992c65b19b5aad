"""megagrid: the same pretraining run on every TP x PP x DP grid."""

__version__ = "0.1.0"
