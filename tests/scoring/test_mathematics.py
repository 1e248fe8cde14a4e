"""Extraction of answers from generations, and equality of answers."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from contextlib import closing

import pytest

from llmfoundry_gauntlet.scoring.math_forms import forms_of
from llmfoundry_gauntlet.scoring.mathematics import Comparer, gold_of

NAMED_BASES = ('two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine')
EQUAL = (
    # numbers
    ('1/2', r'\frac12'),
    ('0.5', r'\dfrac{1}{2}'),
    ('.5', '0.50'),
    ('+5', '5'),
    ('5.', '5'),
    ('\u22125', '-5'),
    ('14,400', r'14,\!400'),
    ('1,000', '1000'),
    ('10{,}000', '10000'),
    (r'111, \! 111', '111111'),
    (r'137 \frac{1}{2}', '137.5'),
    (r'1\frac{12}{13}', r'\frac{25}{13}'),
    (r'-1\frac12', '-1.5'),
    (r'1.2\times 10^{3}', '1200'),
    ('2^{10}', '1024'),
    (r'\binom{5}{2}', '10'),
    ('5!', '120'),
    (r'\log_2 8', '3'),
    (r'3^{2007}', r'3\cdot 3^{2006}'),
    (r'\frac{1}{2004!}', r'\frac1{2004!}'),
    (r'\frac{12}{5,525}', r'\frac{12}{5,\!525}'),
    # how it is written
    ('$5$', '5'),
    (r'\(5\)', '5'),
    ('{5}', '5'),
    (r'\text{13}', '13'),
    (r'\left( 3 \right)', '3'),
    (r'\frac \pi4', r'\pi/4'),
    (r'10\sqrt 2', r'10\sqrt{2}'),
    (r'\tfrac34', r'\frac{3}{4}'),
    (r'\mathbf{v}', 'v'),
    (r'\text{3\sqrt{2}}', r'3\sqrt2'),
    (r'\text{\frac{\sqrt{5}-1}{2}}', r'\frac{\sqrt5-1}{2}'),
    (r'\text{8-i}', '8-i'),
    (r'\text{25 \pi}', r'25\pi'),
    (r'\text{(2,12)}', '(2,12)'),
    (r'\text{[46, \infty)}', r'x\ge46'),
    (r'\text{0.0011_{2}}', '0.0011_2'),
    (r'1\cdot 0.0011_{2}', '0.0011_2'),
    (r'1 \cdot (1,2)', '(1,2)'),
    (r'\text{\text{east}}', 'east'),
    (r'\text{\frac{270}7\text{ degrees}}', r'\frac{270}7\text{ degrees}'),
    (r'x = \text{-\frac{8}{5}}', '-1.6'),
    (r'\mathrm{\begin{pmatrix}1\\2\end{pmatrix}}', r'\begin{pmatrix}1\\2\end{pmatrix}'),
    (r'\mathbf{10}', '10'),
    (r'\displaystyle 5\quad', '5'),
    (r'\big(1,2\big)', '(1,2)'),
    (r'\[5\]', '5'),
    (r'\lbrace 1,2\rbrace', r'\{2,1\}'),
    (r'x \lt 3', 'x<3'),
    (r'3 \gt x', 'x<3'),
    (r'x\leq 3', r'x\le 3'),
    (r'x\geq 3', '3<=x'),
    ('x>=3', r'[3,\infty)'),
    (r'x\neq 3', r'x\ne 3'),
    (r'1,2,\cdots', r'1,2,\ldots'),
    ('30\u00b0', r'30^\circ'),
    ('3\u00d74', '12'),
    ('5\u03c0', r'5\pi'),
    ('\u221a2', r'\sqrt2'),
    (r'\langle 1,2\rangle', '(1,2)'),
    (r'x\leqslant 3', 'x<=3'),
    (r'x\geqslant 3', 'x>=3'),
    ('x\u22603', r'x\ne 3'),
    ('x \u2208 (0,1]\u222a[2,3)', r'(0,1]\cup[2,3)'),
    ('x\u22653', '[3,\u221e)'),
    ('x\u22643', r'x\le 3'),
    ('x\u00b3+x\u00b2', 'x^3+x^2'),
    ('3\u00b7x', '3x'),
    (r'5 1/2', '5.5'),
    (r'2\mathrm{i}', '2i'),
    (r'\operatorname{sin}(x)', r'\sin x'),
    (r'\text{sin}(x)', r'\sin x'),
    (r'\left.x\right.', 'x'),
    (r'\bm{5}', '5'),
    (r'\binom52', '10'),
    (r'\sqrt\frac12', r'\frac{\sqrt2}{2}'),
    (r'\frac\sqrt3 2', r'\frac{\sqrt{3}}{2}'),
    (r'5\ast 4', '20'),
    (r'30\degrees', '30'),
    (r'44 per cent', r'44\%'),
    (r'\text{1/2}', '0.5'),
    (r'\text{2^3}', '8'),
    (r'\text{3+4}', '7'),
    (r'\text{x<3}', 'x<3'),
    (r'\textnormal{east}', r'\text{east}'),
    (r'\emph{east}', 'east'),
    (r'5\text{ cm}^4', '5 cm^4'),
    (r'\begin{vmatrix}1&2\\3&4\end{vmatrix}', '-2'),
    # expressions
    ('x+11', '11+x'),
    ('12x -34', '-34+12x'),
    ('(x+1)^2', 'x^2+2x+1'),
    (r'\frac{\sqrt{3}}{3}', r'\frac{1}{\sqrt3}'),
    (r'7z^{96}(4z+1)', '28z^{97}+7z^{96}'),
    (r'\sqrt{x}', 'x^{1/2}'),
    (r'\sec x', r'\frac{1}{\cos x}'),
    ('5 - 10i', '-10i+5'),
    ('2i^2', '-2'),
    (r'2+i\sqrt3', r'2+\sqrt{3}i'),
    (r'e^{i\pi}', '-1'),
    (r'\ln e', '1'),
    (r'3-2f(x)', '-2f(x)+3'),
    (r'\frac{h^2}{m}', 'h^2/m'),
    (r'\sqrt[3]{8}', '2'),
    ('4(3-x)(3+x)', '36-4x^2'),
    (r'\sqrt{3+2\sqrt{2}}', r'1+\sqrt2'),
    ('|{-3}|', '3'),
    (r'\cos 58^\circ', r'\sin 32^\circ'),
    # a name before the answer; equations
    ('x=4', '4'),
    ('x = 4', 'x=4'),
    ('y=2x', '2x'),
    ('P(x)=x^2+1', 'x^2+1'),
    ('(x,y)=(1,2)', '(1,2)'),
    ('y = 2x + 3', 'y=3+2x'),
    ('y = 2x+3', '2x - y + 3 = 0'),
    ('4x-5y=-50', '8x-10y=-100'),
    (r'\frac{x^2}{16} - \frac{y^2}{9} = 1', '9x^2-16y^2=144'),
    ('f(4)>f(1)>f(2)', 'f(2) < f(1)<f(4)'),
    # units
    (r'5\text{ cm}', '5'),
    (r'5\text{ cm}', r'5\,\mathrm{cm}'),
    (r'5\text{ centimeters}', '5 cm'),
    ('85 ft', r'85\text{ feet}'),
    (r'440\text{ cm}^2', r'440 \text{ square centimeters}'),
    (r'18\text{ ways.}', '18'),
    (r'1\,\text{hour}', '1 hr'),
    (r'\$40', '40'),
    (r'\$ 10', r'10\text{ dollars}'),
    (r'\$115,000', '115000'),
    (r'-\$0.50', '-0.5'),
    (r'30^\circ', '30'),
    (r'180^{\circ}', r'180^\circ'),
    (r'69\text{ degrees}', r'69^\circ'),
    (r'44\%', r'44\text{ percent}'),
    (r'44\%', '0.44'),
    (r'50\%', r'\frac12'),
    ('9 a.m.', r'9\text{ a.m.}'),
    (r'8\sqrt{3} \text { square inches}', r'8\sqrt3'),
    (r'\text{4:30 p.m.}', '4:30 p.m.'),
    ('3:1', '3 : 1'),
    (r'(10,2)\text{ units}', '(10,2)'),
    (r'[5, 5\sqrt2]\text{ cm}', r'[5, 5\sqrt2] \text{ centimeters}'),
    (r'(0,1]\cup(2,3]\text{ units}', r'(0,1]\cup(2,3]'),
    (r'\{1,2\}\text{ cm}', r'\{2,1\}'),
    (r'(7)\text{ cm}', '7 cm'),
    (r'\begin{pmatrix}1\\2\end{pmatrix}\text{ units}', r'(\begin{pmatrix}1\\2\end{pmatrix})'),
    ('3 apples', '3'),
    (r'\text{east}.', r'\text{east}\,'),
    (r' \text{(C)} ', r'\text{(C)}'),
    (r'5\text{ cm squared}', r'5\text{ cm}^2'),
    (r'5\text{ cm cubed}', r'5\text{ cubic cm}'),
    (r'5\text{ sq ft}', r'5\text{ ft}^2'),
    (r'5\text{ m}^2', r'5\text{ square meters}'),
    (r'5\text{ m^2}', r'5\text{ m^2}'),
    # pairs, intervals, sets, lists, matrices
    ('(1,2)', '( 1, 2 )'),
    (r'\left(\frac12,3\right)', '(0.5,3)'),
    (r'[0,\infty)', r'\left[0, \infty\right)'),
    (r'x \in [-2,7]', '[-2,7]'),
    (r'-2\le x\le 7', '[-2,7]'),
    ('x>3', r'(3,\infty)'),
    ('3 < x', 'x > 3'),
    (r'(0,\infty)\cup(-\infty,0)', r'(-\infty, 0) \cup (0, \infty)'),
    ('1,2', '2, 1'),
    (r'\{1,2\}', r'\{2,1\}'),
    ('1,2', r'\{1, 2\}'),
    (r'19 \text{ and }43', '19, 43'),
    ('7, -2, \\text{ and } -5', '-5,-2,7'),
    ('x=1 or x=2', '1,2'),
    (r'1\pm\sqrt{19}', r'1+\sqrt{19}, 1-\sqrt{19}'),
    (r'\{1\pm\sqrt{5},-2\}', r'\{-2,1-\sqrt5,1+\sqrt5\}'),
    ('x=1, y=2', 'y=2, x=1'),
    ('x=1, y=2', '1, 2'),
    (r'\emptyset', r'\varnothing'),
    (r'\begin{pmatrix} 1/2 & 0\\ 3&4 \end{pmatrix}', r'\begin{bmatrix}\frac12&0\\3&4\end{bmatrix}'),
    # words and bases
    (r'\text{Evelyn}', 'evelyn'),
    (r'\text{(C)}', 'C'),
    (r'(\text{E})', r'\text{E}'),
    (r'\text{A,D}', 'A, D'),
    *((rf'11_{{\text{{{name}}}}}', f'11_{base}') for base, name in enumerate(NAMED_BASES, start=2)),
    ('2112_6', '2112_{6}'),
    (r'2112_{\text{six}}', '2112_6'),
    ('152A_{11}', '152a_{11}'),
)
UNEQUAL = (
    # numbers, near ones too
    ('1', '2'),
    ('-5', '5'),
    ('0.5', '50'),
    ('10', '1000'),
    ('1.0000001', '1'),
    ('100000000', '100000001'),
    ('0.333333', r'\frac13'),
    ('1.414214', r'\sqrt2'),
    ('3.1415926535897932', r'\pi'),
    ('10\\pi', '31.4'),
    (r'\frac12', r'\frac21'),
    (r'\frac{1}{2}', '12'),
    (r'\frac{1}{2004!}', r'\frac{1}{2003!}'),
    ('3^{2007}', '3^{2006}'),
    # names, letters and expressions
    ('x=4', 'y=4'),
    ('x^2', 'x^3'),
    ('2x', 'x^2'),
    ('3R^2', '3r^2'),
    ('A', 'a'),
    ('A', 'B'),
    ('x!', 'x'),
    ('4x', '4'),
    (r'\cos 58^\circ', r'\cos 58'),
    (r'2\sin x', '2'),
    ('2sinx', '2'),
    ('xy=2', '2'),
    (r'\log_2 8', '\\log_8 2'),
    ('1+2i', '2+i'),
    ('i', '-i'),
    (r'\sqrt[3]{8}', r'\sqrt{8}'),
    (r'x+10^{-9}', 'x'),
    # lists are no numbers
    ('2,3', '5'),
    ('23', '2,3'),
    # equations
    ('x^2+1=0', 'x^2+2=0'),
    ('y=2x+3', 'y=2x-3'),
    ('x=2', 'x^2=4'),
    (r'x\ne 3', 'x=3'),
    (r'x \ne 3', '3'),
    # pairs, intervals, lists and sets
    ('(1,2)', r'\{1,2\}'),
    (r'\left(1,2\right)', r'\{1,2\}'),
    ('(1,2)', '{1,2}'),
    ('(1,2)', '(2,1)'),
    ('(1,2)', '[1,2]'),
    ('(1,2)', '(1,2]'),
    ('(1,2)', '1,2'),
    ('1,2', '1,3'),
    ('1,2', '1,2,3'),
    ('1,2', '1,2,2'),
    ('1', '1,2'),
    ('x=1,y=2', 'x=2,y=1'),
    ('x=1,y=2', '2,1'),
    (r'x>3', r'x\ge 3'),
    ('x>3', 'x<3'),
    ('x<3', 'y<3'),
    (r'(0,1)\cup(2,3)', r'(0,1]\cup(2,3)'),
    (r'\infty', r'-\infty'),
    (r'1\pm\sqrt{19}', r'1+\sqrt{19}'),
    ('f(2) < f(1) < f(4)', 'f(1)<f(2)<f(4)'),
    # ratios and bases
    ('3:1', '1:3'),
    ('3:1', '3'),
    ('10_2', '10'),
    ('10_2', '10_3'),
    ('10_2', '2'),
    # units
    (r'5\text{ cm}', r'5\text{ m}'),
    (r'5\text{ cm}', r'5\text{ cm}^2'),
    (r'(1,2)\text{ cm}', r'(1,2)\text{ m}'),
    (r'(1,2)\text{ units}', '(2,1)'),
    (r'[1,2]\text{ cm}', '[1,2)'),
    (r'\{1,2\}\text{ cm}', r'\{1,2\}\text{ m}'),
    # mathematics in texts, factors of one
    (r'\text{3\sqrt{2}}', r'2\sqrt3'),
    (r'\text{5 m}', r'5\text{ cm}'),
    ('x = x+1', 'x+1'),
    (r'\text{0.0011_{2}}', '0.0011'),
    (r'1\cdot 10_{2}', '10'),
    (r'1\cdot 5', '15'),
    (r'\text{2 or 3}', '2'),
    (r'\text{no } x', 'x'),
    (r'\text{x is 3}', '3x'),
    (r'\text{(A) 3}', '(B) 3'),
    # as LaTeX sets it: 17 and a half
    (r'\frac725', r'\frac{7}{25}'),
    # percent, degrees, money and times
    (r'50\%', '50'),
    (r'50\%', '0.05'),
    (r'4\%', '4x'),
    (r'30^\circ', r'30\%'),
    (r'\$5', '5 cents'),
    ('6 days', '6 hours'),
    ('9\\text{ a.m.}', '9\\text{ p.m.}'),
    # words and matrices
    ('team', 'meat'),
    (r'\text{even}', 'odd'),
    (r'\overline{CD}', r'\overline{CE}'),
    (r'\begin{pmatrix}1\\2\end{pmatrix}', r'\begin{pmatrix}2\\1\end{pmatrix}'),
    (r'\begin{pmatrix}1\\2\end{pmatrix}', r'\begin{pmatrix}1&2\end{pmatrix}'),
    (r'\begin{vmatrix}1&2\\3&4\end{vmatrix}', r'\begin{pmatrix}1&2\\3&4\end{pmatrix}'),
    # nothing
    ('', ''),
    ('', '0'),
    (' ', ' '),
    ('0', r'\emptyset'),
    (None, None),
    (None, 'None'),
)

# Other notations of matrices, powers of ten, recurring decimals, plus and minus, ratios and bases.
EQUAL_NOTATIONS = (
    # matrices and their factors
    ('\\begin{pmatrix}1&0\\\\0&1\\end{pmatrix}', '\\left[\\begin{array}{cc}1&0\\\\0&1\\end{array}\\right]'),
    ('\\begin{pmatrix}1&0\\\\0&1\\end{pmatrix}', '\\left(\\begin{array}{c|c}1&0\\\\0&1\\end{array}\\right)'),
    ('\\begin{pmatrix}1&0\\\\0&1\\end{pmatrix}', '\\begin{bmatrix}1&0\\\\[1ex]0&1\\end{bmatrix}'),
    ('\\begin{pmatrix}1&0\\\\0&1\\end{pmatrix}', '\\begin{bmatrix}1&0\\cr 0&1\\cr\\end{bmatrix}'),
    ('\\begin{pmatrix}1&0\\\\0&1\\end{pmatrix}', '\\bigl(\\begin{smallmatrix}1&0\\\\0&1\\end{smallmatrix}\\bigr)'),
    ('\\begin{pmatrix}1/2\\\\3/2\\end{pmatrix}', '\\frac12\\begin{pmatrix}1\\\\3\\end{pmatrix}'),
    ('\\begin{pmatrix}1/2\\\\3/2\\end{pmatrix}', '\\frac{1}{2}\\left[\\begin{array}{c}1\\\\3\\end{array}\\right]'),
    ('\\begin{pmatrix}-1\\\\-3\\end{pmatrix}', '-\\begin{pmatrix}1\\\\3\\end{pmatrix}'),
    ('\\begin{pmatrix}\\sqrt2\\\\3\\sqrt2\\end{pmatrix}', '\\sqrt2\\cdot\\begin{pmatrix}1\\\\3\\end{pmatrix}'),
    ('A=\\begin{pmatrix}1\\\\3\\end{pmatrix}', '\\begin{pmatrix}1\\\\3\\end{pmatrix}'),
    ('-2', '\\left|\\begin{array}{cc}1&2\\\\3&4\\end{array}\\right|'),
    ('\\begin{pmatrix}1/3\\\\-2\\end{pmatrix}', '\\begin{pmatrix}\\frac13\\\\[1ex]-2\\end{pmatrix}'),
    # powers of ten
    ('6.02\\times10^{23}', '6.02e23'),
    ('300', '3e2'),
    ('0.0015', '1.5E-3'),
    # recurring decimals
    ('\\frac4{11}', '0.\\overline{36}'),
    ('\\frac13', '0.333...'),
    ('\\frac13', '0.\\bar3'),
    ('\\frac13', '0.\\dot{3}'),
    ('\\frac16', '0.1\\overline{6}'),
    ('\\frac{4}{11}', '0.3636\\ldots'),
    ('\\frac16', '0.1666\\dots'),
    ('1', '0.\\overline{9}'),
    ('\\frac17', '0.\\dot{1}4285\\dot{7}'),
    ('-\\frac13', '-0.\\overline{3}'),
    ('\\frac13', '0.(3)'),
    # plus and minus
    ('-3,-2,2,3', 'x=\\pm2,\\pm3'),
    ('-3,-2,2,3', 'x=\\pm2 \\text{ or } x=\\pm3'),
    ('-3,-2,2,3', '\\{\\pm2,\\pm3\\}'),
    ('-2,0,2', 'x=0,\\pm 2'),
    ('-2,0,2', 'x=\\pm2, x=0'),
    # ratios
    ('1:2', '2:4'),
    ('1:2', '1\\colon 2'),
    ('2:3', '\\frac23'),
    ('1:2:3', '2:4:6'),
    ('2:3', '2/3'),
    ('\\sqrt2:2', '1:\\sqrt2'),
    # bases
    ('1011_2', '(1011)_2'),
    ('1011_2', '(1011)_{2}'),
    ('1011_2', '1011_{(2)}'),
    ('1011_2', '1011_{\\text{two}}'),
    ('152A_{11}', '(152a)_{11}'),
    ('0.0011_2', '(0.0011)_2'),
    # times
    ('4:30', '4:30'),
)
UNEQUAL_NOTATIONS = (
    ('\\begin{pmatrix}1&0\\\\0&1\\end{pmatrix}', '\\left[\\begin{array}{cc}1&0\\\\0&2\\end{array}\\right]'),
    ('\\begin{pmatrix}1&0\\\\0&1\\end{pmatrix}', '2\\begin{pmatrix}1&0\\\\0&1\\end{pmatrix}'),
    ('\\begin{pmatrix}1&0\\\\0&1\\end{pmatrix}', '\\left|\\begin{array}{cc}1&0\\\\0&1\\end{array}\\right|'),
    ('\\begin{pmatrix}1&0\\\\0&1\\end{pmatrix}', '\\begin{vmatrix}1&0\\\\0&1\\end{vmatrix}'),
    ('\\begin{pmatrix}1\\\\2\\end{pmatrix}', '[\\begin{array}{cc}1&2\\end{array}]'),
    ('\\begin{pmatrix}1\\\\2\\end{pmatrix}', '-\\begin{pmatrix}1\\\\2\\end{pmatrix}'),
    (
        '\\begin{pmatrix}1&0\\\\0&1\\end{pmatrix}',
        '\\begin{pmatrix}1&0\\\\0&1\\end{pmatrix}+\\begin{pmatrix}1&0\\\\0&1\\end{pmatrix}',
    ),
    ('\\begin{pmatrix}1\\\\2\\end{pmatrix}', 'x+\\begin{pmatrix}1\\\\2\\end{pmatrix}'),
    ('\\begin{pmatrix}1\\\\2\\end{pmatrix}', '2-\\begin{pmatrix}1\\\\2\\end{pmatrix}'),
    ('3e2', '6e'),
    ('3e2', '6'),
    ('3e', '3'),
    ('6.02e23', '6.02\\times10^{22}'),
    ('1e3_{16}', '1000'),
    ('2e', '20'),
    ('\\frac13', '0.333'),
    ('\\frac13', '0.33'),
    ('\\frac4{11}', '0.36...'),
    ('\\frac{4}{11}', '0.3\\overline{6}'),
    ('\\frac13', '0.\\overline{33}4'),
    ('\\frac13', '0.\\overline{34}'),
    ('\\pi', '3.14...'),
    ('\\pi', '3.141592653\\ldots'),
    ('-3,-2,2,3', 'x=\\pm2,3'),
    ('-3,-2,2,3', 'x=\\pm2, y=\\pm3'),
    ('2,3', 'x=\\pm2,\\pm3'),
    ('1:2', '2:1'),
    ('1:2', '1:3'),
    ('1:2', '2'),
    ('3:1', '3'),
    ('2:3', '\\frac32'),
    ('4:30', '2:15'),
    ('4:30', '8:60.5'),
    ('1:2:3', '2:4:7'),
    ('1:2', '1:2:0'),
    ('0:0', '1:2'),
    ('2:3', '(2,3)'),
    ('1011_2', '(1011)_3'),
    ('1011_2', '(1011)'),
    ('1011_2', '(1010)_2'),
    ('1011_2', '11'),
    ('1011_2', '1011_{(3)}'),
    ('\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}', '\\begin{pmatrix}1&2&3&4\\end{pmatrix}'),
)

# Sets of real numbers as intervals, inequalities, exceptions and complements.
EQUAL_SETS = (
    ('(-\\infty,2)\\cup(5,\\infty)', 'x<2 \\text{ or } x>5'),
    ('(-\\infty,2)\\cup(5,\\infty)', 'x<2 or x>5'),
    ('(-\\infty,2)\\cup(5,\\infty)', 'x<2, x>5'),
    ('(-\\infty,2)\\cup(5,\\infty)', 'x>5 \\text{ or } x<2'),
    ('(-\\infty,2)\\cup(5,\\infty)', '2>x \\lor 5<x'),
    ('(-\\infty,2)\\cup(5,\\infty)', '\\{x \\mid x<2 \\text{ or } x>5\\}'),
    ('(-\\infty,2)\\cup(5,\\infty)', '\\left\\{x \\in \\mathbb{R} : x<2 \\text{ or } x>5\\right\\}'),
    ('(-\\infty,2)\\cup(5,\\infty)', 'x \\in (-\\infty,2)\\cup(5,\\infty)'),
    ('(-\\infty,2)\\cup(5,\\infty)', 'x\\in(-\\infty,2) \\text{ or } x\\in(5,\\infty)'),
    ('(-\\infty,2)\\cup(5,\\infty)', '\\mathbb{R}\\setminus[2,5]'),
    ('(-\\infty,-2]\\cup[2,\\infty)', 'x\\le-2 \\text{ or } x\\ge 2'),
    ('[-3,-2]\\cup[0,1]', '-3\\le x\\le-2 \\text{ or } 0\\le x\\le 1'),
    ('(-\\infty,-2)\\cup(0,1)\\cup(2,4)', 'x<-2, 0<x<1, \\text{ or } 2<x<4'),
    ('(-\\infty,3)\\cup(3,\\infty)', 'x<3 \\text{ or } x>3'),
    ('(-\\infty,3)\\cup(3,\\infty)', 'x\\ne 3'),
    ('(-\\infty,3)\\cup(3,\\infty)', '\\mathbb{R}\\setminus\\{3\\}'),
    ('(-\\infty,3)\\cup(3,\\infty)', '\\mathbb R - \\{3\\}'),
    ('(-\\infty,3)\\cup(3,\\infty)', 'x\\in\\mathbb{R}, x\\ne3'),
    ('(-\\infty,3)\\cup(3,\\infty)', '\\{x\\in\\mathbb{R}\\mid x\\neq 3\\}'),
    ('(-\\infty,3)\\cup(3,\\infty)', 'x \\in \\mathbb{R}\\setminus\\{3\\}'),
    ('(-\\infty,3)\\cup(3,\\infty)', '(-\\infty,\\infty)\\setminus\\{3\\}'),
    ('(-\\infty,-7)\\cup(-7,3)\\cup(3,\\infty)', 'x\\ne-7,3'),
    ('(-\\infty,-7)\\cup(-7,3)\\cup(3,\\infty)', 'x\\ne-7 \\text{ and } x\\ne 3'),
    ('(-\\infty,-7)\\cup(-7,3)\\cup(3,\\infty)', '\\mathbb{R}\\setminus\\{-7,3\\}'),
    ('(-\\infty,-7)\\cup(-7,3)\\cup(3,\\infty)', 'x\\neq -7, x\\neq 3'),
    ('\\mathbb{R}', '(-\\infty,\\infty)'),
    ('\\text{all real numbers}', '(-\\infty,\\infty)'),
    ('x\\in\\mathbb{R}', '(-\\infty,\\infty)'),
    ('(2,5)', 'x>2 \\text{ and } x<5'),
    # A comma means `and` where `or` would be every number.
    ('(2,5)', 'x>2, x<5'),
    ('(2,5)', 'x<5, x>2'),
    ('(2,5)', '2<x, 5>x'),
    ('[2,5]', 'x\\ge 2, x\\le 5'),
    ('(1,5)', 'x>0, x<5, x>1'),
    ('(\\sqrt{2},\\sqrt{7}]', 'x>\\sqrt2, x\\le\\sqrt7'),
    ('(2,5)', '\\{x \\mid x>2, x<5\\}'),
    ('x>2 \\text{ and } x<5', 'x<5, x>2'),
    ('(-\\infty,2)\\cup(5,\\infty)', 'x>5, x<2'),
    ('(-\\infty,2)\\cup(2,\\infty)', 'x>2, x<2'),
    ('\\mathbb{R}', 'x>2 \\text{ or } x<5'),
    ('\\mathbb{R}', 'x<5 \\text{ or } x>2'),
    ('\\{-1\\}\\cup[0,7)', 'x=-1 \\text{ or } 0\\le x<7'),
    ('(1,4-\\sqrt{3})\\cup(4+\\sqrt{3},7)', '1<x<4-\\sqrt3 \\text{ or } 4+\\sqrt3<x<7'),
    ('(0,9)\\cup(9,36)', '0<x<36, x\\ne9'),
    ('(0,9)\\cup(9,36)', '0 < x < 36 \\text{ and } x \\neq 9'),
    ('(0,9)\\cup(9,36)', '(0,36)\\setminus\\{9\\}'),
    ('(2,5)', '\\{x \\mid 2<x<5\\}'),
    ('[3,\\infty)', '\\{x : x\\ge3\\}'),
)
UNEQUAL_SETS = (
    ('(-\\infty,2)\\cup(5,\\infty)', 'x\\le2 \\text{ or } x>5'),
    ('(-\\infty,2)\\cup(5,\\infty)', 'x<2 and x>5'),
    ('(-\\infty,2)\\cup(5,\\infty)', 'x<2 or x>6'),
    ('(-\\infty,2)\\cup(5,\\infty)', 'x>2 or x>5'),
    ('(-\\infty,2)\\cup(5,\\infty)', 'x<2'),
    ('(-\\infty,2)\\cup(5,\\infty)', 'x<2 \\text{ or } y>5'),
    ('(-\\infty,-2]\\cup[2,\\infty)', 'x<-2 \\text{ or } x\\ge2'),
    ('(-\\infty,3)\\cup(3,\\infty)', 'x=3'),
    ('(-\\infty,3)\\cup(3,\\infty)', 'x\\ne-3'),
    ('(-\\infty,3)\\cup(3,\\infty)', '\\mathbb{R}'),
    ('(-\\infty,3)\\cup(3,\\infty)', '\\mathbb{R}\\setminus\\{3,4\\}'),
    ('(-\\infty,-7)\\cup(-7,3)\\cup(3,\\infty)', 'x\\ne-7'),
    ('(-\\infty,-7)\\cup(-7,3)\\cup(3,\\infty)', 'x\\ne 7,3'),
    ('\\mathbb{R}', '(-\\infty,\\infty]'),
    ('\\mathbb{R}', 'R'),
    ('\\mathbb{R}', '(0,\\infty)'),
    ('\\mathbb{R}', '\\mathbb{Z}'),
    ('\\mathbb{R}', '\\infty'),
    ('(2,5)', 'x>2 \\text{ or } x<5'),
    ('(2,5)', 'x\\ge2, x\\le5'),
    ('(2,5)', 'x<2, x>5'),
    ('\\mathbb{R}', 'x>2, x<5'),
    ('\\mathbb{R}', 'x<5, x>2'),
    ('x>2, x<5', 'x>2 \\text{ or } x<5'),
    ('x>2 \\text{ and } x<5', 'x>2 \\text{ or } x<5'),
    ('\\emptyset', 'x<2, x>5'),
    ('2,5', 'x<2 \\text{ or }x>5'),
    ('(2,5)', '\\{2,5\\}'),
    ('(-\\infty,3)\\cup(3,\\infty)', '3'),
    ('x\\ne 3', '3'),
    ('x\\ne 3', 'x=3'),
    ('(-\\infty,2)\\cup(5,\\infty)', '(2,5)'),
    ('(0,9)\\cup(9,36)', '0<x<36'),
    ('\\{-1\\}\\cup[0,7)', 'x=-1 \\text{ or } 0<x<7'),
    ('f(2) < f(1) < f(4)', 'f(2)<f(4)<f(1)'),
    ('\\emptyset', 'x<2 \\text{ or } x>5'),
    ('y<2 or y>5', 'x<2 or x>5'),
)


def test_equal_answers_are_equal_in_either_order(comparer: Comparer):
    assert [
        pair
        for pair in (*EQUAL, *EQUAL_NOTATIONS, *EQUAL_SETS)
        if not comparer.equal(*pair) or not comparer.equal(*pair[::-1])
    ] == []


def test_unequal_answers_are_not_equal(comparer: Comparer):
    assert [
        pair
        for pair in (*UNEQUAL, *UNEQUAL_NOTATIONS, *UNEQUAL_SETS)
        if comparer.equal(*pair) or comparer.equal(*pair[::-1])
    ] == []


def test_numbers_and_words_need_no_worker():
    with closing(Comparer()) as comparer:
        assert comparer.equal(r'\frac{3}{4}', '0.75')
        assert not comparer.equal('3', '4')
        assert comparer.equal(r'\text{Friday}', 'Friday')
        assert comparer._workers == {}


def unequal(comparer: Comparer, pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the pairs that are not equal."""
    return [pair for pair, is_equal in zip(pairs, comparer.equal_many(pairs), strict=True) if not is_equal]


def test_golds_in_other_notation_are_right(rows: list[dict[str, str]], comparer: Comparer):
    golds = sorted({gold_of(row['problem'], row['solution'], None) for row in rows})
    pairs = []
    for gold in golds:
        pairs += [
            (gold.replace(r'\frac', r'\dfrac').replace(' ', '  '), gold),
            (f'${gold}$', gold),
            (gold.replace(r'\left', '').replace(r'\right', ''), gold),
        ]

    assert len(golds) > 2000
    assert unequal(comparer, pairs) == []


def test_matrices_of_the_golds_are_right_in_other_notation(rows: list[dict[str, str]], comparer: Comparer):
    golds = sorted({gold_of(row['problem'], row['solution'], None) for row in rows})
    matrices = [gold for gold in golds if r'\begin{pmatrix}' in gold]
    pairs = []
    for gold in matrices:
        num_columns = max(row.count('&') + 1 for row in gold.split('\\\\'))
        opening = rf'\left[\begin{{array}}{{{"c" * num_columns}}}'
        as_array = gold.replace(r'\begin{pmatrix}', opening).replace(r'\end{pmatrix}', r'\end{array}\right]')
        pairs += [
            (as_array, gold),
            (as_array.replace('\\\\', r'\\[1ex]'), gold),
            (gold.replace('pmatrix', 'bmatrix').replace('\\\\', r'\cr '), gold),
            (gold.replace('pmatrix', 'matrix').replace('\\\\', r'\cr '), gold),
        ]

    assert len(matrices) > 50
    assert unequal(comparer, pairs) == []


def as_inequality(interval: str) -> str:
    """Return an interval's inequality; a set stays."""
    ends = re.fullmatch(r'\s*([(\[])(.*),(.*)([)\]])\s*', interval)
    if ends is None:
        return rf'x \in {interval}'
    opening, low, high, closing = ends.groups()
    signs = {'(': '<', ')': '<', '[': r'\le ', ']': r'\le '}
    left = '' if low.strip() == r'-\infty' else f'{low} {signs[opening]}'
    right = '' if high.strip() == r'\infty' else f'{signs[closing]} {high}'
    return f'{left} x {right}'


def test_unions_of_the_golds_are_right_as_inequalities(rows: list[dict[str, str]], comparer: Comparer):
    golds = {gold_of(row['problem'], row['solution'], None) for row in rows}
    unions = sorted(gold for gold in golds if r'\cup' in gold)
    assert len(unions) > 20
    pairs, wrong = [], []
    for gold in unions:
        intervals = re.sub(r'\\(?:left|right)(?![a-z])', '', gold).split(r'\cup')
        conditions = [as_inequality(interval) for interval in intervals]
        pairs += [(joint.join(conditions), gold) for joint in (' or ', r' \text{ or } ', r'\lor ')]
        pairs += [(r'\{x \mid ' + ' or '.join(reversed(conditions)) + r'\}', gold)]
        wrong += [(' or '.join(conditions[1:]), gold)]
        closed = [condition.replace('<', r'\le ') for condition in conditions]
        wrong += [(' or '.join(closed), gold)] if closed != conditions else []
    assert [pair for pair, equal in zip(pairs, comparer.equal_many(pairs), strict=True) if not equal] == []
    assert [pair for pair, equal in zip(wrong, comparer.equal_many(wrong), strict=True) if equal] == []


@pytest.mark.parametrize(
    'answer',
    [
        '0.' + '1234567890' * 95 + r'\ldots',
        ' or '.join(f'x<{number}' for number in range(90)),
        ', '.join(rf'x \ne {number}' for number in range(49)),
        r'\{x \mid ' * 60,
        '1' * 900 + r'\begin{pmatrix}' * 5,
        '1:' * 400 + '2',
        '(' * 500 + 'x<2 or x>5',
    ],
)
def test_long_answers_in_these_notations_take_no_time(answer: str):
    begin = time.process_time()
    forms_of(answer)
    assert time.process_time() - begin < 2


def test_importing_loads_no_sympy_or_torch():
    program = (
        'import sys, llmfoundry_gauntlet.scoring.mathematics\n'
        'print(sorted({"sympy", "math_verify", "torch", "numpy", "antlr4"} & set(sys.modules)))'
    )
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == '[]'
