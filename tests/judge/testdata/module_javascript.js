console.log(require('./helper').value);
