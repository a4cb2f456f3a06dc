const words = require('fs').readFileSync(0, 'utf8').split(/\s+/);
console.log(words.slice(1, 1 + Number(words[0])).map(Number).reduce((a, b) => a + b, 0));
